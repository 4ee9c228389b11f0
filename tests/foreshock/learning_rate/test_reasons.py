"""Tests of the reason of an advice: "would" for what is not applied or not corroborated, nothing after the end; and
what is said of a surge is not said of later decisions."""

from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState
from foreshock.learning_rate.advice import OperatorKind
from foreshock.learning_rate.control_loop import LoopState
from foreshock.learning_rate.decisions import AdviceState, Decision, Observation, decide, decide_as_operator, fold
from foreshock.learning_rate.modes import AdviceMode
from foreshock.learning_rate.reasons import NO_SIGNAL, RUN_HAS_ENDED, SHADOW, advice_reason
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, watch

CONFIGURATION = WarningConfiguration()


def reason(state: WarningState, mode: AdviceMode = "shadow", *, has_ended: bool = False) -> str:
    return advice_reason(advice_of(state), state, CONFIGURATION, mode, has_ended=has_ended)


def advice_of(state: WarningState) -> AdviceState:
    seen = Observation(1, state.step or 0, state.step or 0, state.surge_step, 0)
    log: list[Decision] = []
    return fold([*log, *decide(fold(log), seen)])


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


LOWERED = LoopState(update=8e-3, updates=20, error=1.2, log_scale=-0.9)


def lowered_by_the_loop(log: list[Decision], seen: Observation) -> list[Decision]:
    """Return the log after the loop has lowered the scale by its largest fall of ten steps at most."""
    later = replace(seen, observed_step=seen.observed_step + 10, trainer_step=-1, loop=LOWERED)
    return [*log, *decide(fold(log), later)]


@pytest.mark.parametrize("mode", ["apply", "shadow"])
@pytest.mark.parametrize("kind", ["loop", "hold", "halve"])
def test_what_is_said_of_a_surge_is_not_said_of_later_decisions(kind: str, mode: AdviceMode) -> None:
    state, _ = watch(surge(0.4))
    seen = Observation(1, 119, 119, state.surge_step, 0)
    log = list(decide(fold([]), seen))
    if kind == "loop":
        log = lowered_by_the_loop(log, seen)
        said = "The update is 0.008 nats per token (set point 0.002)"
    else:
        operator: OperatorKind = "hold" if kind == "hold" else "halve"
        said = "Held while the eval runs."
        log.append(decide_as_operator(fold(log), operator, seen, said))
    found = advice_reason(fold(log), state, CONFIGURATION, mode, has_ended=False)
    assert [decision.kind for decision in log] == ["surge", kind]
    assert found == log[-1].reason + (SHADOW if mode == "shadow" else "")
    assert found.startswith(said)
    assert NO_SIGNAL not in found
    assert "Rules have" not in found


def test_surge_in_shadow_mode_names_what_lowers_the_scale_beside_it() -> None:
    state, _ = watch(surge(0.4))
    seen = Observation(1, 119, 119, None, 0)
    log = [decide_as_operator(fold([]), "halve", replace(seen, observed_step=100, trainer_step=-1), "too fast")]
    halved = [*log, *decide(fold(log), replace(seen, surge_step=state.surge_step))]
    found = advice_reason(fold(halved), state, CONFIGURATION, "shadow", has_ended=False)
    assert found.endswith("would halve every 181 steps. The advised scale was halved at 101.")
    both = lowered_by_the_loop(log, replace(seen, observed_step=109))
    both += decide(fold(both), replace(seen, surge_step=state.surge_step))
    assert [decision.kind for decision in both] == ["halve", "loop", "surge"]
    found = advice_reason(fold(both), state, CONFIGURATION, "shadow", has_ended=False)
    assert found.endswith("The advised scale was halved at 101 and is 0.41 by the control loop.")


@pytest.mark.parametrize("mode", ["apply", "shadow"])
def test_pending_surge_does_not_hide_that_the_loop_lowers(mode: AdviceMode) -> None:
    state, _ = watch(closed_steps({LENGTH: np.r_[np.full(10, 1000.0), np.full(10, 2500.0)]}))
    assert state.surge.pending is not None
    log = lowered_by_the_loop([], Observation(1, 9, 9, None, 0))
    found = advice_reason(fold(log), state, CONFIGURATION, mode, has_ended=False)
    assert found == log[-1].reason + (SHADOW if mode == "shadow" else "")


def test_run_that_has_ended_gets_no_advice() -> None:
    state, _ = watch(surge(4.0))
    assert reason(state, "apply", has_ended=True) == RUN_HAS_ENDED
