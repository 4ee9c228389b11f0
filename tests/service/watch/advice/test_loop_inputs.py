"""The control loop and input that is late, foreign or of another attempt: never a jump, never a rise by accident."""

from __future__ import annotations

from itertools import pairwise

import httpx
import numpy as np
import pytest

from foreshock.clock import now_us
from foreshock_service.watch.advice import service
from tests.service.sending import make_batch, start_run
from tests.service.watch.recorded import K3, RecordedRun

LAG = "rollout:lag_mean"
STEPS = 30


def step_of(number: int) -> dict[str, float]:
    """Return the mismatch of a run whose sampler lags by eight steps, at five times the set point."""
    return {K3: 2e-4 if number == 1 else 3e-2, LAG: 0.0 if number == 1 else 8.0}


def close(run: RecordedRun, first: int = 1, last: int = STEPS) -> RecordedRun:
    for number in range(first, last + 1):
        run.close(number, step_of(number))
    return run


def scales(run: RecordedRun, last: int = STEPS + 20) -> list[float]:
    state = run.advice()
    return [state.scale(step) for step in range(1, last)]


def test_results_of_a_probe_are_no_reading_however_old(recorded: RecordedRun) -> None:
    before = scales(close(recorded))
    assert before[STEPS] < 0.5
    for step in (2, STEPS):
        recorded.close(step, {"torch.trainer/rollout:k3_kl": 1e-9, "torch.trainer/vllm.prefill:k3_kl": 9.0})
    assert scales(recorded) == before


def test_the_newest_attempt_counts_if_two_trainers_log_one_run(recorded: RecordedRun) -> None:
    close(recorded)
    recorded.resume(20)
    alone = scales(recorded)
    for step in range(STEPS + 1, STEPS + 10):
        recorded.close(step, {K3: 0.5, LAG: 8.0}, attempt=1)
    assert scales(recorded) == alone
    close(recorded, 20, STEPS)
    assert recorded.advice().attempt == 2


@pytest.mark.parametrize("jump_us", [-(10**12), 10**15])
def test_clock_that_jumps_changes_no_scale(
    recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch, jump_us: int
) -> None:
    other = RecordedRun(recorded.database).begin("another-run")
    expected = scales(close(other))
    close(recorded, 1, 10)
    monkeypatch.setattr(service, "now_us", lambda: now_us() + jump_us)
    close(recorded, 11, STEPS)
    assert scales(recorded) == expected


def test_k3_of_log_probs_that_the_lint_proves_wrong_moves_no_lever(http: httpx.Client) -> None:
    run = start_run(http)
    for step in range(1, 9):
        batch = make_batch(160, seed=step)
        assert batch.trainer_log_probs is not None
        shifted = batch.trainer_log_probs.copy()
        for first, end in pairwise(batch.response_offsets):
            shifted[first:end] = np.roll(shifted[first:end], 1)
        assert run.put_shard(step, make_batch(160, seed=step, trainer_log_probs=shifted)).status_code == 201
        assert run.put_scalars(step, {"learning_rate": 1e-6}).status_code == 204
    levers = run.get("advice").json()
    assert "shifted_log_probs" in {warning["name"] for warning in run.get("lint").json()["warnings"]}
    assert (levers["rate"]["scale"], levers["correction"]["advised"]) == (1.0, None)
