"""The surge detector's settings, its input of a step, its state, and the events of its detections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from foreshock.diagnosis.rule import Event
from foreshock.learning_rate.length_decay import ScheduleSettings
from foreshock.severity import Severity


@dataclass(frozen=True, slots=True)
class SurgeSettings:
    """The constants of the detector.

    They come from the published description of two runs, from the definition of the surge step and from generated
    curves (`benchmarks/diagnosis`); recorded runs only judge them.
    """

    growth: float = 2.0
    """Crossing, as a multiple of the baseline (the definition of the surge step)."""
    average_run_length: float = 1e5
    """Observations between false alarms, on average at least, if the noise is as estimated: at most one in 250 healthy
    runs of 400 observations has a false surge."""
    window_fraction: float = 0.25
    """Growth window / step. A surge at 110 takes some tens of steps, one at 1,500 (ten times lower learning rate)
    correspondingly more: steepness scales with the step."""
    minimum_window: int = 12
    """Steps. A run that doubled over 10-13 steps (8 to 21) surged, one that took 21 (14 to 35) ramped and improved."""
    maximum_window: int = 100
    """Steps. Slower doublings are ramps at any step."""
    baseline_values: int = 5
    """Values that a baseline needs at least: the median of five is the shortest that tolerates two outliers."""
    confirmation_values: int = 4
    """Values that a crossing must hold at least: the median of four tolerates one outlier."""
    abandoning_values: int = 3
    """Values after which a crossing is abandoned if its median has fallen back."""
    maximum_crossing_values: int = 40
    """Values after which a crossing with too little evidence is dropped as noise."""
    least_noise: float = 0.03
    """The smallest standard deviation of the innovations of log lengths: the mean over 1,000 responses whose length
    has a standard deviation as large as its mean."""
    noise_values: int = 100
    """The newest values before the growth window that the noise is estimated from."""
    rise_z: float = 5.5
    """Standard deviations of the wander of the series by which a crossing must exceed the baseline: strongly
    autocorrelated noise doubles by itself."""
    ramp_rate: float = 0.0175
    """Log growth a step of the steepest ramp: four times in 80 steps."""
    late_step: int = 280
    """Beyond this step the rate falls as 1 / step: a surge at 1,500 (ten times lower learning rate) takes longer."""
    steep_z: float = 3.2
    """Standard errors by which a surge must be steeper than the steepest ramp."""
    drift_values: int = 60
    """Values before the baseline from which a steady drift is known: the lengths must double beyond it."""
    largest_drift: float = math.log(1.5)
    """Largest log growth that counts as drift; the rest is part of the surge."""
    early_surge_step: int = 20
    """Surges up to this step need corroboration: many real runs change length at steps 5-20 and stay healthy."""
    corroboration_steps: int = 50
    """Steps after its confirmation within which an early surge, or one with a rising reward, can be corroborated."""
    quiet_steps: int = 50
    """Steps after a confirmed surge without another detection, so that one steep rise is one surge."""
    smoothing_values: int = 5
    """Values in the running median of levels, ramps and the high-water mark."""
    reward_z: float = 3.0
    """Standard deviations of the difference of two means from which on the reward counts as rising with the lengths."""
    truncated_at_cap: float = 0.5
    """Truncated fraction from which the mean length is the cap and shows no growth."""
    capped_values: int = 2
    """Values at the cap in a row that disarm the detector: one may be the surge itself."""
    fraction_of_cap: float = 0.9
    """A mean length beyond this fraction of a known cap is at the cap."""

    def window(self, step: int) -> int:
        """Return the steps within which the length must double at ``step``."""
        return min(max(int(self.window_fraction * step), self.minimum_window), self.maximum_window)

    @property
    def log_growth(self) -> float:
        return math.log(self.growth)


SurgeKind = Literal["surge", "early_surge", "surge_again", "growth_with_reward", "ramp"]

Watching = Literal["warming", "no_lengths", "at_cap", "watching", "growing_with_reward", "surged"]


@dataclass(frozen=True, slots=True)
class StepLengths:
    """The lengths of a step: the mean length in tokens, its longest response, the fraction cut at the cap, the mean
    reward. None or not finite: not measured."""

    mean: float | None
    longest: float | None = None
    truncated: float | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Crossing:
    """An unconfirmed crossing of twice the baseline.

    ``baseline`` (of ``baseline_values`` values) and ``threshold`` are log lengths, ``before`` the values that the noise
    is estimated from, ``rising`` the steps and values of the growth window up to now, ``since`` the values from the
    crossing on, ``rewards_before`` the rewards of the baseline, ``rewards_since`` those from the crossing on.
    """

    step: int
    baseline: float
    baseline_values: int
    threshold: float
    before: tuple[float, ...]
    rising_steps: tuple[int, ...]
    rising: tuple[float, ...]
    since: tuple[float, ...]
    rewards_before: tuple[float, ...]
    rewards_since: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SurgeDetection:
    """A detection at ``step``; lengths in tokens, ``noise`` in log units per step.

    If ``effective``, the schedule counts from ``surge_step``. ``onset`` is the most likely first step of the rise, with
    its interval; ``log_evidence`` the log of the e-detector, and ``confidence`` one minus the bound on the probability
    of a false alarm.
    """

    kind: SurgeKind
    step: int
    surge_step: int
    length: float
    baseline: float
    noise: float
    autocorrelation: float
    effective: bool
    onset: int
    onset_first: int
    onset_last: int
    log_evidence: float = 0.0
    confidence: float = 0.0
    truncated: float | None = None
    reward_change: float | None = None


@dataclass(frozen=True, slots=True)
class SurgeState:
    """The state of the detector; plain data, all lengths as natural logs. ``rewards`` are those of ``steps``.

    Nothing in it counts or sums over the whole run: after a late step it soon equals the state without it.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    rewards: tuple[float | None, ...] = ()
    high_water: float | None = None
    anchor: float | None = None
    anchor_step: int = 0
    anchor_reward: float | None = None
    crossing: Crossing | None = None
    last_confirmed_step: int | None = None
    pending: SurgeDetection | None = None
    effective_surge_step: int | None = None
    cap: float | None = None
    capped: int = 0
    missing: int = 0
    armed_since: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "crossing": self.crossing and asdict(self.crossing),
            "pending": self.pending and asdict(self.pending),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SurgeState:
        crossing, pending = value["crossing"], value["pending"]
        return cls(
            **_with_tuples(value)
            | {
                "crossing": crossing and Crossing(**_with_tuples(crossing)),
                "pending": pending and SurgeDetection(**pending),
            }
        )


def _with_tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}


MISSING_STEPS = 10
"""Closed steps without any length after which "no_lengths" is reported instead of "warming"."""


def forget_lengths(state: SurgeState) -> SurgeState:
    """Return the state without any length: the next values are the baseline. A confirmed surge keeps its effect."""
    return SurgeState(last_confirmed_step=state.last_confirmed_step, effective_surge_step=state.effective_surge_step)


def watching(state: SurgeState, settings: SurgeSettings) -> Watching:
    """Return what the detector is doing, in one word; "warming" never lasts: without lengths it is "no_lengths"."""
    if state.effective_surge_step is not None:
        return "surged"
    if state.capped >= settings.capped_values:
        return "at_cap"
    if state.pending is not None and state.pending.kind == "growth_with_reward":
        return "growing_with_reward"
    if len(state.values) >= settings.baseline_values or state.last_confirmed_step is not None:
        return "watching"
    return "no_lengths" if state.missing >= MISSING_STEPS else "warming"


def is_armed(state: SurgeState, settings: SurgeSettings) -> bool:
    """Return whether a surge could be detected at the next step: there is a baseline, and no cap."""
    return len(state.values) >= settings.baseline_values and state.capped < settings.capped_values


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
    "surge": "The mean response length has doubled steeply: a length surge.",
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
            "onset_step": detection.onset,
            "onset_first": detection.onset_first,
            "onset_last": detection.onset_last,
            "confirmation_step": detection.step,
            "log_evidence": detection.log_evidence,
            "confidence": detection.confidence,
        }
    if learning_rate_sum is not None and learning_rate is not None:
        # Assume the rate at the confirmation for the few steps back to the surge.
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
