"""What is favoured beside the rate, where the truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from foreshock.api.watch import RemedyRecord
from foreshock.learning_rate.loop import FIRST_UPDATES, LoopSettings, LoopState, Reading, advance_loop
from foreshock.learning_rate.remedies import LEAST_ROLLOUTS, LEAST_UPDATES, OFFERED, evaluate_remedies, favoured
from tests.foreshock.batches import compared
from tests.foreshock.corrections.direct import batch_of

SETTINGS = LoopSettings()
DRIVEN = LoopState(static=2e-4, measured_static=True, driven=2e-2, average=2e-2, error=1.2, log_scale=-0.5)
"""Lagging mismatch of three times the set point, and no update that is logged."""


def remedies_of(spread: float, rollouts: int = 64) -> tuple[RemedyRecord, ...]:
    """Return the remedies of a step of 20 tokens a rollout whose log ρ has this standard deviation, and E[ρ] = 1."""
    d = np.random.default_rng(0).normal(-(spread**2) / 2, spread, (rollouts, 20))
    step = compared(batch_of(d.tolist()))
    return evaluate_remedies(step.statistics, step.summaries)


def test_healthy_run_is_told_nothing() -> None:
    assert favoured(LoopState(static=2e-4, driven=1e-3, average=1e-3), SETTINGS, remedies_of(0.1)).why == ""


def test_every_offered_correction_has_its_effect_and_an_interval() -> None:
    also = remedies_of(0.2)
    assert [each.correction for each in also] == list(OFFERED)
    for each in also:
        assert 0.0 <= each.expected.kept_low <= each.expected.kept_sequences <= each.expected.kept_high <= 1.0
        assert 0.0 < each.expected.ess <= 1.0
        assert math.isfinite(each.expected.distortion)


def test_masking_is_favoured_if_it_keeps_the_sample() -> None:
    found = favoured(DRIVEN, SETTINGS, remedies_of(0.1))
    assert found.favours == "correction"
    assert found.why.startswith("Correct the loss rather than lower the rate: sequence MIS at 2 would drop ")
    assert found.also[0].expected.ess > 0.5


def test_rate_is_favoured_if_masking_leaves_too_little() -> None:
    found = favoured(DRIVEN, SETTINGS, remedies_of(0.5))
    assert found.favours == "rate"
    assert "would leave an effective sample of only" in found.why


def test_rate_is_favoured_if_updates_are_too_large_whatever_masking_keeps() -> None:
    found = favoured(replace(DRIVEN, full_update=2e-2, updates=LEAST_UPDATES), SETTINGS, remedies_of(0.1))
    assert found.favours == "rate"
    assert "10 × its set point, and no correction makes it smaller" in found.why


def test_cause_is_favoured_if_the_mismatch_is_there_at_any_rate() -> None:
    numerics = LoopState(static=2e-2, measured_static=True, driven=0.0, average=8e-4)
    found = favoured(numerics, SETTINGS, remedies_of(0.2))
    assert found.favours == "cause"
    assert found.why.startswith("Lowering the learning rate will not help: 96 % of the mismatch is there at any rate.")
    assert "Sequence MIS at 2 would drop" in found.why
    assert favoured(numerics, SETTINGS, ()).favours == "cause"


@pytest.mark.parametrize("rate", [1e-4, None])
def test_large_update_is_told_beside_a_static_mismatch(rate: float | None) -> None:
    state = LoopState()
    reading = Reading(k3=2e-2, lag=0.0, update=4 * SETTINGS.update_set_point, rate=rate)
    for number in range(1, 31):
        state = advance_loop(state, reading, SETTINGS)
        found = favoured(state, SETTINGS, remedies_of(0.2))
        # The first updates are larger.
        expected = "cause" if number <= FIRST_UPDATES else None if number < LEAST_UPDATES else "rate"
        assert found.favours == expected
        if expected is None:
            assert found.why == (
                f"Rate or cause: it cannot tell before 15 updates are logged, and {number} are. 100 % of the mismatch "
                "is there at any rate: find its cause by a probe."
            )
    moved = "at the full one an update moves the policy by" if rate else "the newest update moved the policy by"
    assert state.log_scale < -1.0
    assert found.why == (
        f"Lower the rate: {moved} 8.0e-3 nats per token, 4 × its set point, and no correction makes it smaller. 100 % "
        "of the mismatch is there at any rate: find its cause by a probe."
    )
    small = advance_loop(LoopState(), replace(reading, update=SETTINGS.update_set_point), SETTINGS)
    assert favoured(small, SETTINGS, ()).favours == "cause"


@pytest.mark.parametrize(("rollouts", "enough"), [(LEAST_ROLLOUTS - 1, False), (LEAST_ROLLOUTS, True)])
def test_fewer_rollouts_than_the_minimum_cannot_tell(rollouts: int, enough: bool) -> None:
    also = remedies_of(0.1, rollouts=rollouts)
    found = favoured(DRIVEN, SETTINGS, also)
    assert bool(also) is enough
    assert (found.favours is None) is not enough
    assert enough or f"needs {LEAST_ROLLOUTS} rollouts" in found.why


@pytest.mark.parametrize("holes", [1, LEAST_ROLLOUTS])
def test_rollouts_with_a_missing_log_prob_are_not_counted(holes: int) -> None:
    batch = batch_of([[0.1, -0.1]] * LEAST_ROLLOUTS)
    assert batch.trainer_log_probs is not None
    batch.trainer_log_probs[: 2 * holes : 2] = math.nan
    step = compared(batch)
    assert evaluate_remedies(step.statistics, step.summaries) == ()


def updated(steps: int, applied: bool) -> LoopState:
    """Return the state after updates that grow with the rate to the power of 1.5: five set points at the full one."""
    state = LoopState()
    for _ in range(steps):
        rate = 1e-4 * (math.exp(state.log_scale) if applied else 1.0)
        moved = 5.0 * SETTINGS.update_set_point * (rate / 1e-4) ** 1.5
        state = advance_loop(state, Reading(k3=2e-4, lag=0.0, update=moved, rate=rate), SETTINGS)
    return state


@pytest.mark.parametrize("applied", [True, False], ids=["apply", "shadow"])
def test_update_at_the_full_rate_is_known_after_the_loop_has_lowered_it(applied: bool) -> None:
    state = updated(60, applied)
    assert state.log_scale < -0.5
    assert state.full_update == pytest.approx(5.0 * SETTINGS.update_set_point, rel=0.05)
    assert favoured(state, SETTINGS, ()).favours == "rate"


def test_first_large_updates_of_an_optimizer_without_moments_do_not_count() -> None:
    state = LoopState()
    for number in range(LEAST_UPDATES):
        update = 2e-2 if number < FIRST_UPDATES else 1e-3
        state = advance_loop(state, Reading(k3=2e-2, lag=8.0, update=update, rate=1e-4), SETTINGS)
        assert (favoured(state, SETTINGS, remedies_of(0.1)).favours is None) is (number < LEAST_UPDATES - 1)
    assert favoured(state, SETTINGS, remedies_of(0.1)).favours == "correction"
