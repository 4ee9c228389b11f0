"""The control loop and input that is late, foreign or of another attempt: never a jump, never a rise by accident."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.clock import now_us
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_service.watch.advice import service
from tests.service.sending import Sender, log_probs_of, make_batch, start_run
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
def test_jump_of_the_clock_changes_no_scale(
    recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch, jump_us: int
) -> None:
    other = RecordedRun(recorded.database).begin("another-run")
    expected = scales(close(other))
    close(recorded, 1, 10)
    monkeypatch.setattr(service, "now_us", lambda: now_us() + jump_us)
    close(recorded, 11, STEPS)
    assert scales(recorded) == expected


def shifted(batch: RolloutBatch) -> np.ndarray:
    found = log_probs_of(batch)[1].copy()
    for first, end in pairwise(batch.response_offsets):
        found[first:end] = np.roll(found[first:end], 1)
    return found


def same(batch: RolloutBatch) -> np.ndarray:
    return log_probs_of(batch)[0]


def levers_of(http: httpx.Client, column: Column, scalars: dict[str, float], **declared: Any) -> dict[str, Any]:
    """Return the advice after eight steps of a run whose trainer logs such log-probs, and scalars."""
    run = start_run(http)
    for step in range(1, 9):
        batch = make_batch(160, seed=step)
        logged = make_batch(160, seed=step, trainer_log_probs=column(batch), attributes=BatchAttributes(**declared))
        assert run.put_shard(step, logged).status_code == 201
        assert run.put_scalars(step, {"learning_rate": 1e-6, **scalars}).status_code == 204
    found: dict[str, Any] = run.get("advice").json()
    return found


Column = Callable[[RolloutBatch], np.ndarray]
LARGE_UPDATE = {"update_k3": 0.02, "rollout/lag_mean": 8.0}


def test_k3_of_log_probs_that_the_lint_proves_wrong_moves_no_lever(http: httpx.Client) -> None:
    levers = levers_of(http, shifted, {})
    assert (levers["rate"]["scale"], levers["correction"]["advised"], levers["remedy"]) == (1.0, None, "nothing")


@pytest.mark.parametrize("lag", [0.0, 8.0])
@pytest.mark.parametrize(
    ("column", "declared", "why"),
    [
        (shifted, {}, "the two log-probs are shifted by one token"),
        (same, {}, "the two log-probs are the same numbers"),
        (same, {"trainer_policy": "bypass"}, "the two log-probs are the same numbers"),
    ],
)
def test_log_probs_without_mismatch_advise_no_correction(
    http: httpx.Client, column: Column, declared: dict[str, Any], why: str, lag: float
) -> None:
    levers = levers_of(http, column, {**LARGE_UPDATE, "rollout/lag_mean": lag}, **declared)
    assert (levers["correction"]["advised"], levers["remedy"]) == (None, "cause")
    assert levers["why"].endswith(f"2 × its set point. No correction is advised: {why}.")
    # The update is measured by the trainer's own log-probs.
    assert levers["rate"]["advised_scale"] < 0.9
    healthy = start_run(http, "healthy")
    assert healthy.put_shard(1, make_batch(160)).status_code == 201
    assert healthy.put_scalars(1, {"learning_rate": 1e-6, **LARGE_UPDATE}).status_code == 204
    assert healthy.get("advice").json()["correction"]["advised"] is not None


def test_no_correction_is_advised_to_a_run_that_measures_no_mismatch(sender: Sender) -> None:
    for step in range(1, 9):
        assert sender.put_shard(step, make_batch(160, seed=step, trainer_log_probs=None)).status_code == 201
        assert sender.put_scalars(step, {"learning_rate": 1e-6, **LARGE_UPDATE}).status_code == 204
    found = sender.get("advice").json()
    assert (found["correction"]["advised"], found["remedy"]) == (None, "cause")
    assert found["why"].endswith("No correction is advised: no step has measured a mismatch.")


def test_rate_of_0_leaves_nothing_to_scale(recorded: RecordedRun) -> None:
    def close_at(rate: float, first: int, last: int) -> list[float]:
        for step in range(first, last):
            recorded.log(step, {"learning_rate": rate, "update_k3": 0.02})
            recorded.close(step, {**step_of(step), LAG: 8.0})
        return scales(recorded)

    # What is there without any update is static, also at a lag.
    assert set(close_at(0.0, 1, STEPS)) == {1.0}
    assert recorded.advice().correction.last is None
    lowered = close_at(1e-6, STEPS, STEPS + 10)[STEPS + 9]
    assert lowered < 0.9
    assert close_at(0.0, STEPS + 10, STEPS + 20)[-1] > 0.8 * lowered
