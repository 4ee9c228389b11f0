"""A replay gives what was logged, and another step's weights do not. On real runs, through real engines.

The engines are held to the instruction set that recorded a run, and the bar is max |d| ≤ 1e-5. A CPU that has less
rounds elsewhere: torch then differs by no more than its own noise floor (k3 < 1e-6, or four times that of the same
scorer in other batches). vLLM's CPU kernels differ by more, because those without AVX512-BF16 cut float32 off to
bfloat16 where the others round: there the bar is only that the right weights fit at least ten times better than wrong
ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recorded_runs import RecordedRun, recorded_runs
from benchmarks.replay import BAR_K3, BAR_MAXIMUM, SCORERS, Replayer, Row, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

RUNS = recorded_runs()
if not RUNS:
    pytest.skip("no recorded run with checkpoints is there", allow_module_level=True)


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: run.name)
def rows(request: pytest.FixtureRequest, replay: Replayer) -> list[Row]:
    """Every checkpointed step of a run, scored with its own weights, rebatched, and with another step's."""
    run: RecordedRun = request.param
    return list(rows_of(run, replay))


def of_scorer(rows: list[Row], scorer: str) -> list[Row]:
    chosen = [row for row in rows if row.scorer == scorer]
    assert chosen
    return chosen


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_right_weights_give_what_was_logged(rows: list[Row], scorer: str) -> None:
    for row in of_scorer(rows, scorer):
        if row.same:
            assert row.right.maximum <= BAR_MAXIMUM, row
        elif scorer == "torch.trainer":
            assert row.right.k3 < max(BAR_K3, 4 * row.floor.k3), row
        else:
            assert row.right.k3 < 0.1 * row.wrong.k3, row


@pytest.mark.parametrize("scorer", SCORERS)
def test_another_step_s_weights_do_not(rows: list[Row], scorer: str) -> None:
    for row in of_scorer(rows, scorer):
        assert row.wrong.maximum > 100 * BAR_MAXIMUM, row
        assert row.wrong.k3 > 100 * BAR_K3, row


def test_float32_is_the_same_through_vllm_and_through_torch(replay: Replayer) -> None:
    run = RUNS[0]
    step = run.steps()[-1]
    batch, weights = run.rollouts(step), run.checkpoint(step)
    environment = RUNS[-1].environment.nearest()  # in which the engines are warm
    by_torch, _ = replay.score(batch, weights, "torch.float32", environment=environment)
    by_vllm, fingerprint = replay.score(batch, weights, "vllm.prefill", environment=environment, dtype="float32")
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
    assert (fingerprint.engine, fingerprint.dtype) == ("vllm", "float32")
