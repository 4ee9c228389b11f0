"""Tests that a replay with the right weights equals the logged values, on recorded runs with real engines.

The engines are held to the instruction set that recorded a run, and the bar is max |d| ≤ 1e-5. A CPU with a lower one
rounds differently: torch then differs by no more than its own noise floor (k3 < 1e-6, or four times that of the same
scorer in other batches). vLLM's CPU kernels differ by more, because those without AVX512-BF16 truncate float32 to
bfloat16 and the others round: the bar is then that k3 of the right weights is below a tenth of that of wrong weights.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recorded_runs import RecordedRun, recorded_runs, shipped_run
from tests.probes.replaying import BAR_K3, BAR_MAXIMUM, SCORERS, Replayer, Row, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

RUNS = recorded_runs()
if not RUNS:
    pytest.skip("there is no recorded run with checkpoints", allow_module_level=True)


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: run.name)
def rows(request: pytest.FixtureRequest, replay: Replayer) -> list[Row]:
    """Checkpointed steps of a run, scored with their own weights, and with the weights of another step."""
    run: RecordedRun = request.param
    return list(rows_of(run, replay))


def of_scorer(rows: list[Row], scorer: str) -> list[Row]:
    chosen = [row for row in rows if row.scorer == scorer]
    assert chosen
    return chosen


@pytest.mark.parametrize("scorer", SCORERS)
def test_replay_with_the_right_weights_equals_the_logged_values(rows: list[Row], scorer: str) -> None:
    for row in of_scorer(rows, scorer):
        if row.same:
            assert row.right.maximum <= BAR_MAXIMUM, row
        elif row.floor is not None:
            assert row.right.k3 < max(BAR_K3, 4 * row.floor.k3), row
        else:
            assert row.right.k3 < 0.1 * row.wrong.k3, row


@pytest.mark.parametrize("scorer", SCORERS)
def test_replay_with_the_weights_of_another_step_differs(rows: list[Row], scorer: str) -> None:
    for row in of_scorer(rows, scorer):
        assert row.wrong.maximum > 100 * BAR_MAXIMUM, row
        assert row.wrong.k3 > 100 * BAR_K3, row


def test_decode_of_forced_tokens_gives_the_logged_log_probs(replay: Replayer) -> None:
    run = shipped_run()
    step = run.steps()[0]
    rollouts = run.rollouts(step)
    environment = run.environment.nearest()
    scored, _ = replay.score(rollouts, run.checkpoint(step), "vllm.decode", environment=environment)
    assert rollouts.rollout_log_probs is not None
    bar = 1e-5 if environment == run.environment else 0.05
    assert np.abs(scored - rollouts.rollout_log_probs).max() <= bar


def test_vllm_and_torch_agree_in_float32(replay: Replayer) -> None:
    run = RUNS[0]
    step = run.steps()[-1]
    batch, weights = run.rollouts(step), run.checkpoint(step)
    environment = RUNS[-1].environment.nearest()  # the engines are already warm in it
    by_torch, _ = replay.score(batch, weights, "torch.float32", environment=environment)
    by_vllm, fingerprint = replay.score(batch, weights, "vllm.prefill", environment=environment, dtype="float32")
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
    assert (fingerprint.engine, fingerprint.dtype) == ("vllm", "float32")
