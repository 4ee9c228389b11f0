"""The events of the surge detector: names, severities, texts and evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreshock.early_warning.events import Event
from foreshock.early_warning.schedule import ScheduleSettings
from foreshock.early_warning.surge_settings import SurgeSettings
from foreshock.early_warning.surge_state import SurgeDetection, SurgeKind
from foreshock.severity import Severity

RULES: Mapping[SurgeKind, str] = {
    "surge": "length_surge",
    "early_surge": "length_surge_early",
    "surge_again": "length_surge_again",
    "growth_with_reward": "length_growth_with_reward",
    "ramp": "length_ramp",
}
_SEVERITY: Mapping[SurgeKind, Severity] = {
    "surge": "critical",
    "early_surge": "warning",
    "surge_again": "warning",
    "growth_with_reward": "info",
    "ramp": "info",
}
_WHY: Mapping[SurgeKind, str] = {
    "surge": "The mean response length has doubled steeply: the length surge that precedes a collapse.",
    "early_surge": "The mean response length has doubled steeply within the first steps. Many healthy runs do so, "
    "and no mismatch, gradient or reward rule is firing.",
    "surge_again": "The mean response length has doubled steeply once more.",
    "growth_with_reward": "Watching: lengths grow with reward. The mean response length has doubled steeply, and the "
    "reward has risen with it.",
    "ramp": "The mean response length has doubled over many steps: a ramp, not a surge.",
}
_WHAT_TO_DO: Mapping[SurgeKind, str] = {
    "surge": "Follow the length-decay schedule, which counts from the first step of the surge.",
    "early_surge": "Nothing yet: the schedule starts by itself if the mismatch or the gradient norm rises too, or the "
    "reward falls.",
    "surge_again": "The schedule does not change. Check the mismatch of the newest steps.",
    "growth_with_reward": "Nothing yet: the schedule starts by itself if the reward falls, or the mismatch or the "
    "gradient norm rises.",
    "ramp": "Nothing: a slow ramp has no effect on the learning rate. Check that the reward rises with it.",
}


def event_of(
    detection: SurgeDetection,
    settings: SurgeSettings,
    schedule: ScheduleSettings,
    learning_rate_sum: float | None,
    learning_rate: float | None,
) -> Event:
    """Return the event of a detection. ``learning_rate_sum`` is Σ η up to it: a second clock, beside the steps."""
    evidence: dict[str, float | int | str | None] = {
        "surge_step": detection.surge_step,
        "baseline_length": detection.baseline,
        "growth": detection.length / detection.baseline,
        "noise": detection.noise,
        "autocorrelation": detection.autocorrelation,
        "window_steps": settings.window(detection.surge_step),
        "truncated_fraction": detection.truncated,
        "reward_change": detection.reward_change,
    }
    if detection.kind != "ramp":
        evidence |= {
            "onset": detection.onset,
            "onset_first": detection.onset_first,
            "onset_last": detection.onset_last,
            "confirmation_step": detection.step,
            "log_evidence": detection.log_evidence,
            "confidence": detection.confidence,
        }
    if learning_rate_sum is not None and learning_rate is not None:
        # The rate of the confirmation holds for the few steps back to the surge.
        at_surge = learning_rate_sum - learning_rate * (detection.step - detection.surge_step)
        evidence["learning_rate_sum_at_surge"] = at_surge
        evidence["learning_rate_sum_of_period"] = schedule.multiplier * at_surge
    if detection.effective:
        evidence["decay_period"] = schedule.period(detection.surge_step)
    kind: SurgeKind = "surge" if detection.effective else detection.kind
    return Event(
        rule=RULES[kind],
        step=detection.step,
        value=detection.length,
        threshold=settings.growth * detection.baseline,
        severity=_SEVERITY[kind],
        why=_WHY[kind],
        what_to_do=_WHAT_TO_DO[kind],
        moves_learning_rate=detection.effective,
        evidence={
            key: value
            for key, value in evidence.items()
            if value is not None and (isinstance(value, str) or math.isfinite(value))
        },
    )
