"""Tests of the reason of an advice: "would" for what is not applied or not corroborated, nothing after the end."""

from __future__ import annotations

import numpy as np

from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState
from foreshock.learning_rate.decisions import AdviceState, Decision, Mode, Observation, decide, fold
from foreshock.learning_rate.reasons import RUN_HAS_ENDED, advice_reason
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, watch

CONFIGURATION = WarningConfiguration()


def reason(state: WarningState, mode: Mode = "shadow", *, has_ended: bool = False) -> str:
    return advice_reason(advice_of(state), state, CONFIGURATION, mode, has_ended=has_ended)


def advice_of(state: WarningState) -> AdviceState:
    seen = Observation(1, state.step or 0, state.step or 0, state.surge_step, 0)
    log: list[Decision] = []
    return fold([*log, *decide(log, seen)])


def surge(gradient: float, steps: int = 120) -> list[ClosedStep]:
    lengths = np.r_[np.full(100, 1000.0), np.full(steps - 100, 2100.0)]
    return closed_steps({LENGTH: lengths, "scalars:grad_norm": np.r_[np.full(95, 0.4), np.full(steps - 95, gradient)]})


def test_surge_without_another_signal_says_would_in_shadow() -> None:
    state, _ = watch(surge(0.4))
    expected = "Response lengths surged at step 101. No mismatch, gradient or reward signal corroborates it"
    assert reason(state) == f"{expected}: the learning rate would halve every 181 steps."
    applied = reason(state, "apply")
    assert "the learning rate halves every 181 steps" in applied
    assert applied.endswith("No mismatch, gradient or reward signal corroborates it.")


def test_corroborated_surge_says_what_it_does() -> None:
    state, _ = watch(surge(4.0))
    assert "would" not in reason(state, "apply")
    assert reason(state, "apply") == "Response lengths surged at step 101: the learning rate halves every 181 steps."
    assert reason(state).endswith("In shadow mode nothing is applied: the trainer gets 1.0.")


def test_early_surge_says_what_the_schedule_would_do() -> None:
    state, _ = watch(closed_steps({LENGTH: np.r_[np.full(10, 1000.0), np.full(10, 2500.0)]}))
    assert state.surge_step is None
    assert reason(state, "apply").endswith("the learning rate would halve every 45 steps.")


def test_lengths_that_grow_with_reward_are_watched() -> None:
    rise = 1.0 / (1.0 + np.exp(-(np.arange(1, 81) - 60) / 4.0))
    noise = 0.02 * np.random.default_rng(0).normal(size=80)
    state, _ = watch(closed_steps({LENGTH: 1000.0 + 2500.0 * rise, "rollout:reward_mean": 0.2 + 0.6 * rise + noise}))
    assert reason(state, "apply").startswith("Watching: lengths grow with reward.")


def test_run_that_has_ended_gets_no_advice() -> None:
    state, _ = watch(surge(4.0))
    assert reason(state, "apply", has_ended=True) == RUN_HAS_ENDED
