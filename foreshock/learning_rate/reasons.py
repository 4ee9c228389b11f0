"""The reason of an advice, as a sentence: what was decided, what would be decided, or what is watched."""

from foreshock.diagnosis.detectors import (
    WATCHING_REASONS,
    WarningConfiguration,
    WarningState,
    is_corroborated,
)
from foreshock.diagnosis.surge_state import SurgeDetection
from foreshock.learning_rate.decisions import AdviceState
from foreshock.learning_rate.length_decay import DECAY_FACTOR, ScheduleSettings, halvings_of
from foreshock.learning_rate.modes import AdviceMode

RUN_HAS_ENDED = "The run has ended: there is nothing to advise."
NO_SIGNAL = "No mismatch, gradient or reward signal corroborates it"
SHADOW = " In shadow mode nothing is applied: the trainer gets 1.0."


def advice_reason(
    advice: AdviceState,
    detectors: WarningState,
    configuration: WarningConfiguration,
    mode: AdviceMode,
    *,
    has_ended: bool,
) -> str:
    """Return the reason of the newest decision, or what is watched. A run that has ended gets no advice.

    If the advice is not applied, the sentence says "would" or names shadow mode. Only the decision on a surge mentions
    that nothing corroborates it: the loop and operators have reasons of their own.
    """
    if has_ended:
        return RUN_HAS_ENDED
    pending = detectors.surge.pending
    stands = advice.is_lowered or advice.held_from_step is not None
    if pending is not None and detectors.surge_step is None and advice.schedule is None and not stands:
        return _pending_reason(pending, configuration.schedule)
    if not advice.reason:
        return WATCHING_REASONS[detectors.watching(configuration.surge)]
    known = advice.schedule
    if advice.kind != "surge" or known is None or is_corroborated(detectors, configuration):
        # The reason of a change of mode already says what the trainer gets.
        is_shown_only = mode == "shadow" and advice.kind != "mode" and (known is not None or advice.is_lowered)
        return advice.reason + (SHADOW if is_shown_only else "")
    if mode == "apply":
        return f"{advice.reason} {NO_SIGNAL}."
    return _would(known.surge_step, known.decay_period, known.factor) + _lowered_before(advice)


def _lowered_before(advice: AdviceState) -> str:
    """Return a sentence on what lowers the advised scale beside the schedule; empty if nothing does."""
    done = "halved" if advice.factor == DECAY_FACTOR else f"multiplied by {advice.factor:g}"
    halvings = halvings_of(advice.points)
    words = [f"was {done} at {', '.join(map(str, halvings))}"] if halvings else []
    if advice.last.loop < 1.0:
        words.append(f"is {max(advice.last.loop, advice.floor):.2g} by the control loop")
    return f" The advised scale {' and '.join(words)}." if words else ""


def _pending_reason(pending: SurgeDetection, schedule: ScheduleSettings) -> str:
    period = schedule.period(pending.surge_step)
    if pending.kind == "growth_with_reward":
        lower = "halve it" if schedule.factor == DECAY_FACTOR else f"multiply it by {schedule.factor:g}"
        return (
            f"{WATCHING_REASONS['growing_with_reward']} If the reward fell, or the mismatch or the gradient norm rose, "
            f"the schedule would {lower} every {period} steps."
        )
    return _would(pending.surge_step, period, schedule.factor)


def _would(surge_step: int, period: int, factor: float) -> str:
    surged = f"Response lengths surged at step {surge_step}."
    would = "halve" if factor == DECAY_FACTOR else f"be multiplied by {factor:g}"
    return f"{surged} {NO_SIGNAL}: the learning rate would {would} every {period} steps."
