"""The sentence that an advice gives as its reason: what was decided, what would be, or what is watched."""

from foreshock.diagnosis.detectors import (
    WATCHING_REASONS,
    WarningConfiguration,
    WarningState,
    is_corroborated,
)
from foreshock.diagnosis.surge_state import SurgeDetection
from foreshock.learning_rate.decisions import AdviceState, Mode
from foreshock.learning_rate.schedule import DECAY_FACTOR, ScheduleSettings

RUN_HAS_ENDED = "The run has ended: there is nothing to advise."
NO_SIGNAL = "No mismatch, gradient or reward signal corroborates it"
SHADOW = " In shadow mode nothing is applied: the trainer gets 1.0."


def advice_reason(
    advice: AdviceState,
    detectors: WarningState,
    configuration: WarningConfiguration,
    mode: Mode,
    *,
    has_ended: bool,
) -> str:
    """Return the reason. What is not applied is said with "would"; a run that has ended gets no advice."""
    if has_ended:
        return RUN_HAS_ENDED
    pending = detectors.surge.pending
    if pending is not None and detectors.surge_step is None and advice.schedule is None:
        return _pending_reason(pending, configuration.schedule_at(pending.surge_step))
    if not advice.reason:
        return WATCHING_REASONS[detectors.watching(configuration.surge)]
    known = advice.schedule
    if known is None or is_corroborated(detectors, configuration):
        return advice.reason + (SHADOW if mode == "shadow" and (known or advice.halvings) else "")
    if mode == "apply":
        return f"{advice.reason} {NO_SIGNAL}."
    would = _would(known.surge_step, known.decay_period, known.factor)
    return would + (f" Rules have halved it at {', '.join(map(str, advice.halvings))}." if advice.halvings else "")


def _pending_reason(pending: SurgeDetection, schedule: ScheduleSettings) -> str:
    period = schedule.period(pending.surge_step)
    if pending.kind == "growth_with_reward":
        return (
            f"{WATCHING_REASONS['growing_with_reward']} If the reward fell, or the mismatch or the gradient norm rose, "
            f"the schedule would {_lower('it', schedule.factor)} every {period} steps."
        )
    return _would(pending.surge_step, period, schedule.factor)


def _would(surge_step: int, period: int, factor: float) -> str:
    surged = f"Response lengths surged at step {surge_step}."
    would = "halve" if factor == DECAY_FACTOR else f"be multiplied by {factor:g}"
    return f"{surged} {NO_SIGNAL}: the learning rate would {would} every {period} steps."


def _lower(what: str, factor: float) -> str:
    return f"halve {what}" if factor == DECAY_FACTOR else f"multiply {what} by {factor:g}"
