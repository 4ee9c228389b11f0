"""The online detector of the length surge: the step that the length-decay schedule counts from.

A surge is the first *confirmed* crossing of twice the smoothed baseline within a window of steep growth. The baseline
is the median length before that window. In a slow ramp the baseline rises too, so the length never crosses; a second,
fixed baseline reports the ramp, without effect on the learning rate. ``surge_step`` is the first step of the confirmed
crossing, not the step of its confirmation: a late surge step lets the run collapse, an early one only slows it down, so
the detector prefers early.

Guards against false surges: the crossing must hold for a number of steps that grows with the run's step-to-step noise;
a return to earlier lengths is no surge; a surge within the first steps affects the learning rate only if a mismatch or
gradient rule corroborates it.

All computations use log lengths and step numbers, so missing steps and runs logged every tenth step work.
The constants were checked on 13 curves with a single usable collapse and on the published description of two more
runs: they are reasoned choices, not fitted ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from foreshock.early_warning.robust import median, step_noise

LOG_TWO = math.log(2.0)

SurgeKind = Literal["surge", "early_surge", "surge_again", "ramp"]


@dataclass(frozen=True, slots=True)
class SurgeSettings:
    """The constants of the detector, each with its reason."""

    growth: float = 2.0
    """Crossing, as a multiple of the baseline (the definition of the surge step)."""
    window_fraction: float = 0.25
    """Growth window / step. A surge at 110 takes some tens of steps, one at 1,500 (ten times lower learning rate)
    correspondingly more: steepness scales with the step."""
    minimum_window: int = 12
    """Steps. A run that doubled over 10-13 steps (8 to 21) surged, one that took 21 (14 to 35) ramped and improved."""
    maximum_window: int = 100
    """Steps. Slower doublings are ramps at any step."""
    baseline_values: int = 5
    """Values that a baseline needs at least: the median of five is the shortest that tolerates two outliers. Noisy runs
    need more."""
    confirmation_values: int = 5
    """Values that a crossing must hold at least: the median of five tolerates two outliers in a row."""
    abandoning_values: int = 3
    """Values after which a crossing is abandoned if its median has fallen back."""
    maximum_confirmation_values: int = 16
    """A crossing that holds this long is confirmed at any noise; a later confirmation would come too late."""
    confirmation_z: float = 5.0
    """log 2 must be this many standard deviations of a median over n values: n = (z σ / log 2)². Five, because medians
    are noisier than means and neighbouring windows are not independent."""
    bounce_fraction: float = 0.25
    """A crossing must exceed ``growth × bounce_fraction`` of the highest smoothed length so far: a return to half of an
    earlier length is no surge."""
    early_surge_step: int = 20
    """Surges up to this step need corroboration: many real runs change length at steps 5-20 and stay healthy."""
    corroboration_steps: int = 50
    """Steps after its confirmation within which an early surge can be corroborated."""
    quiet_steps: int = 50
    """Steps after a confirmed surge without another detection, so that one steep rise is one surge."""
    smoothing_values: int = 5
    """Values in the running median of levels and ramps."""

    def window(self, step: int) -> int:
        """Return the steps within which the length must double at ``step``."""
        return min(max(int(self.window_fraction * step), self.minimum_window), self.maximum_window)

    def confirmation(self, noise: float) -> int:
        """Return the values that a crossing must hold at this log-length noise."""
        return max(self._values_needed(noise), self.confirmation_values)

    def baseline(self, noise: float) -> int:
        """Return the values that a baseline needs: twice as many as a crossing at the same noise."""
        return max(2 * self._values_needed(noise) - 1, self.baseline_values)

    def _values_needed(self, noise: float) -> int:
        needed = math.ceil((self.confirmation_z * noise / math.log(self.growth)) ** 2)
        return min(needed, self.maximum_confirmation_values)

    @property
    def kept_values(self) -> int:
        """Values that are kept at any distance of their steps."""
        return 4 * self.maximum_confirmation_values


@dataclass(frozen=True, slots=True)
class Crossing:
    """An unconfirmed crossing: its first step, baseline, threshold, and the log lengths since."""

    step: int
    baseline: float
    threshold: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SurgeState:
    """The state of the detector; plain data, all lengths as natural logs."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    high_water: float | None = None
    anchor: float | None = None
    anchor_step: int = 0
    crossing: Crossing | None = None
    last_confirmed_step: int | None = None
    pending: SurgeDetection | None = None
    effective_surge_step: int | None = None

    @property
    def warming(self) -> bool:
        """True until there are enough lengths for a baseline."""
        return self.anchor is None

    def to_json(self) -> dict[str, Any]:
        crossing, pending = self.crossing, self.pending
        return {
            "steps": list(self.steps),
            "values": list(self.values),
            "high_water": self.high_water,
            "anchor": self.anchor,
            "anchor_step": self.anchor_step,
            "crossing": crossing
            and {
                "step": crossing.step,
                "baseline": crossing.baseline,
                "threshold": crossing.threshold,
                "values": list(crossing.values),
            },
            "last_confirmed_step": self.last_confirmed_step,
            "pending": pending and pending.to_json(),
            "effective_surge_step": self.effective_surge_step,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SurgeState:
        crossing, pending = value["crossing"], value["pending"]
        return cls(
            steps=tuple(value["steps"]),
            values=tuple(value["values"]),
            high_water=value["high_water"],
            anchor=value["anchor"],
            anchor_step=value["anchor_step"],
            crossing=crossing
            and Crossing(crossing["step"], crossing["baseline"], crossing["threshold"], tuple(crossing["values"])),
            last_confirmed_step=value["last_confirmed_step"],
            pending=pending and SurgeDetection.from_json(pending),
            effective_surge_step=value["effective_surge_step"],
        )


@dataclass(frozen=True, slots=True)
class SurgeDetection:
    """A detection at ``step``; lengths in tokens, ``noise`` in log units per step.

    If ``effective``, the schedule counts from ``surge_step``.
    """

    kind: SurgeKind
    step: int
    surge_step: int
    length: float
    baseline: float
    noise: float
    effective: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "step": self.step,
            "surge_step": self.surge_step,
            "length": self.length,
            "baseline": self.baseline,
            "noise": self.noise,
            "effective": self.effective,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SurgeDetection:
        return cls(**value)


def forget_lengths(state: SurgeState) -> SurgeState:
    """Return the state without any length: the next values are the baseline. A confirmed surge keeps its effect."""
    return SurgeState(last_confirmed_step=state.last_confirmed_step, effective_surge_step=state.effective_surge_step)


def advance_surge(
    state: SurgeState, step: int, length: float | None, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeDetection, ...]]:
    """Return the state after ``step`` and the detections at it.

    ``length`` is the mean response length in tokens (None or not finite: not measured). ``corroborated`` is true if a
    mismatch or gradient rule is firing at this step.
    """
    detections: list[SurgeDetection] = []
    if length is not None and math.isfinite(length) and length >= 0.0:
        # Clamp at one token: log(0) is not finite.
        value = math.log(max(length, 1.0))
        noise = step_noise(state.values[-settings.kept_values :])
        state, confirmed = _advance_crossing(state, step, value, noise, settings)
        state = _remember(state, step, value, settings)
        if confirmed is not None:
            detection = _detection_of(state, step, value, noise, confirmed, corroborated, settings)
            detections.append(detection)
            # The baseline of the next surge is the length of this one, not the length before it.
            known = bisect_left(state.steps, confirmed.step)
            state = replace(
                state,
                steps=state.steps[known:],
                values=state.values[known:],
                last_confirmed_step=step,
                anchor=_level(state, settings),
                anchor_step=step,
                pending=detection if detection.kind == "early_surge" and not detection.effective else state.pending,
                effective_surge_step=detection.surge_step if detection.effective else state.effective_surge_step,
            )
        else:
            state, ramp = _advance_ramp(state, step, noise, settings)
            detections.extend(ramp)
    state, late = _corroborate(state, step, corroborated, settings)
    detections.extend(late)
    return state, tuple(detections)


def _advance_crossing(
    state: SurgeState, step: int, value: float, noise: float, settings: SurgeSettings
) -> tuple[SurgeState, Crossing | None]:
    """Open, abandon or confirm a crossing; return the state and the confirmed crossing."""
    crossing = state.crossing
    if crossing is not None:
        crossing = replace(crossing, values=(*crossing.values, value))
        if len(crossing.values) >= settings.abandoning_values:
            if median(crossing.values) < crossing.threshold:
                crossing = None
            elif len(crossing.values) >= settings.confirmation(noise):
                return replace(state, crossing=None), crossing
        return replace(state, crossing=crossing), None
    if state.last_confirmed_step is not None and step <= state.last_confirmed_step + settings.quiet_steps:
        return state, None
    baseline = _baseline(state, step, noise, settings)
    if baseline is None:
        return state, None
    threshold = math.log(settings.growth) + _lowest_baseline(state, baseline, settings)
    if value < threshold:
        return state, None
    return replace(state, crossing=Crossing(step, baseline, threshold, (value,))), None


def _baseline(state: SurgeState, step: int, noise: float, settings: SurgeSettings) -> float | None:
    """Return the median log length before the growth window, over a span as long as the window; None while warming."""
    needed = settings.baseline(noise)
    if len(state.values) < needed:
        return None
    window = settings.window(step)
    before = bisect_right(state.steps, step - window)
    span = before - bisect_left(state.steps, step - 2 * window)
    last = max(before, needed)
    return median(state.values[last - max(span, needed) : last])


def _lowest_baseline(state: SurgeState, baseline: float, settings: SurgeSettings) -> float:
    if state.high_water is None:
        return baseline
    return max(baseline, state.high_water + math.log(settings.bounce_fraction))


def _remember(state: SurgeState, step: int, value: float, settings: SurgeSettings) -> SurgeState:
    steps, values = (*state.steps, step), (*state.values, value)
    oldest = step - 2 * settings.maximum_window
    drop = min(bisect_left(steps, oldest), max(len(steps) - settings.kept_values, 0))
    state = replace(state, steps=steps[drop:], values=values[drop:])
    if len(values) >= settings.smoothing_values:
        level = _level(state, settings)
        high = level if state.high_water is None else max(level, state.high_water)
        state = replace(state, high_water=high)
        if state.anchor is None:
            state = replace(state, anchor=level, anchor_step=step)
    return state


def _level(state: SurgeState, settings: SurgeSettings) -> float:
    return median(state.values[-settings.smoothing_values :])


def _detection_of(
    state: SurgeState,
    step: int,
    value: float,
    noise: float,
    crossing: Crossing,
    corroborated: bool,
    settings: SurgeSettings,
) -> SurgeDetection:
    early = crossing.step <= settings.early_surge_step
    kind: SurgeKind = "surge"
    effective = True
    if state.effective_surge_step is not None:
        kind, effective = "surge_again", False
    elif early:
        kind, effective = "early_surge", corroborated
    return SurgeDetection(kind, step, crossing.step, _tokens(value), _tokens(crossing.baseline), noise, effective)


def _advance_ramp(
    state: SurgeState, step: int, noise: float, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeDetection, ...]]:
    """Report a doubling that took longer than the growth window, and move the fixed baseline up to it."""
    if state.anchor is None or state.crossing is not None:
        return state, ()
    if state.last_confirmed_step is not None and step <= state.last_confirmed_step + settings.quiet_steps:
        # The rest of a surge's own rise is not a ramp.
        return replace(state, anchor=max(state.anchor, _level(state, settings))), ()
    needed = max(settings.smoothing_values, settings.confirmation(noise))
    if len(state.values) < 2 * needed or step <= state.anchor_step + settings.window(step):
        return state, ()
    level = median(state.values[-needed:])
    if level < math.log(settings.growth) + _lowest_baseline(state, state.anchor, settings):
        return state, ()
    detection = SurgeDetection("ramp", step, step, _tokens(level), _tokens(state.anchor), noise, effective=False)
    return replace(state, anchor=level, anchor_step=step), (detection,)


def _tokens(log_length: float) -> float:
    """Return exp(log_length) rounded to 10 digits: 50, not 49.99999999999999."""
    return float(f"{math.exp(log_length):.10g}")


def _corroborate(
    state: SurgeState, step: int, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeDetection, ...]]:
    """Make a pending early surge effective if it is corroborated; drop it when its time is over."""
    pending = state.pending
    if pending is None or state.effective_surge_step is not None:
        return replace(state, pending=None), ()
    if step > pending.step + settings.corroboration_steps:
        return replace(state, pending=None), ()
    if not corroborated:
        return state, ()
    detection = replace(pending, kind="surge", step=step, effective=True)
    return replace(state, pending=None, effective_surge_step=pending.surge_step), (detection,)
