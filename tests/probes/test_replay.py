"""Tests that a replay with the right weights equals the logged values, on recorded runs with real engines.

The engines are held to the instruction set that recorded a run, and the bar is max |d| ≤ 1e-5. A CPU with a lower one
rounds differently: torch then differs by no more than its own noise floor (k3 < 1e-6, or four times that of the same
scorer in other batches). vLLM's CPU kernels differ by more, because those without AVX512-BF16 truncate float32 to
bfloat16 and the others round: the bar is then that k3 of the right weights is below a tenth of that of wrong weights.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.recorded_runs import RecordedRun, recorded_runs, shipped_run
from tests.probes.replaying import BAR_K3, BAR_MAXIMUM, SCORERS, Asked, Row, rows_of, scored

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

RUNS = recorded_runs()
if not RUNS:
    pytest.skip("there is no recorded run with checkpoints", allow_module_level=True)


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: run.name)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Checkpointed steps of a run, scored with their own weights, and with the weights of another step."""
    run: RecordedRun = request.param
    return rows_of(run, tmp_path_factory.mktemp("rows"))


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


def test_decode_gives_the_logged_log_probs_and_float32_those_of_torch(tmp_path: Path) -> None:
    run = shipped_run()
    step, environment = run.steps()[0], run.environment.nearest()
    batch, weights = run.rollouts(step), run.checkpoint(step)
    asked = (
        Asked(batch, weights, "torch.float32"),
        Asked(batch, weights, "vllm.decode"),
        Asked(batch, weights, "vllm.prefill", options={"dtype": "float32"}),
    )
    (by_torch, _), (decoded, _), (by_vllm, made_by) = scored(tmp_path, *asked, environment=environment)
    assert batch.rollout_log_probs is not None
    bar = 1e-5 if environment == run.environment else 0.05
    assert np.abs(decoded - batch.rollout_log_probs).max() <= bar
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
    assert (made_by.engine, made_by.dtype) == ("vllm", "float32")
