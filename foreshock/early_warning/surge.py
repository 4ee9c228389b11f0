"""The online detector of the length surge: the step that the length-decay schedule counts from.

A surge is the first *confirmed* crossing of twice the smoothed baseline within a window of steep growth. The baseline
is the median length before that window, so a slow ramp, which takes its baseline along, never crosses; it is reported
by a second, anchored baseline as a ramp, without effect on the learning rate. ``surge_step`` is the first step of the
crossing that was confirmed, not the step of its confirmation: the error is asymmetric (too late collapses, too early
only slows), so the detector aims low.

What guards against false surges: the crossing must hold for as many steps as the run's own step-to-step noise asks
for; lengths that merely come back to where they have been are no surge; and a surge within the first steps counts for
the learning rate only when a mismatch or gradient signal corroborates it.

Everything works on log lengths and on step numbers, so missing steps and runs logged every tenth step are fine.
The constants were looked at on 13 curves with a single usable collapse and on the published words about two more runs:
they are reasoned choices, not fitted ones.
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
    """Every constant of the detector, with where it comes from."""

    growth: float = 2.0
    """Crossing, as a multiple of the baseline (the definition of the surge step)."""
    window_fraction: float = 0.25
    """Growth window / step. A surge at 110 takes some tens of steps, one at 1,500 (ten times lower learning rate)
    correspondingly more: what is steep scales with the step."""
    minimum_window: int = 12
    """Steps. A run that doubled over 10-13 steps (8 to 21) surged, one that took 21 (14 to 35) ramped and improved."""
    maximum_window: int = 100
    """Steps. Slower doublings are ramps to the eye at any step."""
    baseline_values: int = 5
    """Values that a baseline needs; with one step's batch the median of five is the shortest that survives two wild
    steps. Noisy runs need more."""
    confirmation_values: int = 5
    """Values that a crossing must hold at least: the median of five survives two wild steps in a row."""
    giving_up_values: int = 3
    """Values after which a crossing whose median fell back is given up."""
    maximum_confirmation_values: int = 16
    """However noisy a run is, a crossing that holds this long is one: later would be of no use."""
    confirmation_z: float = 5.0
    """A median over n values must put log 2 this many standard deviations away: n = (z σ / log 2)². Five, as the
    medians are noisier than means and neighbouring windows are not independent."""
    bounce_fraction: float = 0.25
    """A crossing must exceed ``growth × bounce_fraction`` of the highest smoothed length so far: coming back to half of
    where the run has already been is no surge."""
    early_surge_step: int = 20
    """Surges up to this step need corroboration: many real runs change length at steps 5-20 and stay healthy."""
    corroboration_steps: int = 50
    """How long after its confirmation an early surge can still be corroborated."""
    quiet_steps: int = 50
    """After a confirmed surge no other is looked for, so that one steep rise is one surge."""
    smoothing_values: int = 5
    """Values in the running median that levels and ramps are read from."""

    def window(self, step: int) -> int:
        """Steps within which the length must double for the growth to be steep at ``step``."""
        return min(max(int(self.window_fraction * step), self.minimum_window), self.maximum_window)

    def confirmation(self, noise: float) -> int:
        """Values that a crossing must hold in a run of this log-length noise."""
        return max(self._against(noise), self.confirmation_values)

    def baseline(self, noise: float) -> int:
        """Values that a baseline needs: twice as many as the noise asks of a crossing, as it is compared with."""
        return max(2 * self._against(noise) - 1, self.baseline_values)

    def _against(self, noise: float) -> int:
        needed = math.ceil((self.confirmation_z * noise / math.log(self.growth)) ** 2)
        return min(needed, self.maximum_confirmation_values)

    @property
    def kept_values(self) -> int:
        """Values kept however far apart their steps are."""
        return 4 * self.maximum_confirmation_values


@dataclass(frozen=True, slots=True)
class Crossing:
    """A crossing under observation: where it began, what it crossed, and the log lengths since."""

    step: int
    baseline: float
    threshold: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SurgeState:
    """What the detector remembers; plain data, all lengths as logs."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    high_water: float | None = None
    anchor: float | None = None
    anchor_step: int = 0
    crossing: Crossing | None = None
    last_confirmed_step: int | None = None
    pending: SurgeSign | None = None
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
            pending=pending and SurgeSign.from_json(pending),
            effective_surge_step=value["effective_surge_step"],
        )


@dataclass(frozen=True, slots=True)
class SurgeSign:
    """What the detector says at ``step``; lengths in tokens, ``noise`` in log units per step.

    ``effective`` says that the schedule may count from ``surge_step``.
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
    def from_json(cls, value: Mapping[str, Any]) -> SurgeSign:
        return cls(**value)


def advance_surge(
    state: SurgeState, step: int, length: float | None, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeSign, ...]]:
    """The state after ``step`` with a mean response length of ``length`` tokens (None or not finite: not measured).

    ``corroborated`` says that a mismatch or gradient signal stands at this step.
    """
    signs: list[SurgeSign] = []
    if length is not None and math.isfinite(length) and length >= 0.0:
        # A mean below one token is a run that answers nothing; it must not become log 0.
        value = math.log(max(length, 1.0))
        noise = step_noise(state.values[-settings.kept_values :])
        state, confirmed = _advance_crossing(state, step, value, noise, settings)
        state = _remember(state, step, value, settings)
        if confirmed is not None:
            sign = _sign_of(state, step, value, noise, confirmed, corroborated, settings)
            signs.append(sign)
            # The next surge is measured against the lengths of this one, not against those before it.
            known = bisect_left(state.steps, confirmed.step)
            state = replace(
                state,
                steps=state.steps[known:],
                values=state.values[known:],
                last_confirmed_step=step,
                anchor=_level(state, settings),
                anchor_step=step,
                pending=sign if sign.kind == "early_surge" and not sign.effective else state.pending,
                effective_surge_step=sign.surge_step if sign.effective else state.effective_surge_step,
            )
        else:
            state, ramp = _advance_ramp(state, step, noise, settings)
            signs.extend(ramp)
    state, late = _corroborate(state, step, corroborated, settings)
    signs.extend(late)
    return state, tuple(signs)


def _advance_crossing(
    state: SurgeState, step: int, value: float, noise: float, settings: SurgeSettings
) -> tuple[SurgeState, Crossing | None]:
    """Open, drop or confirm the crossing under observation; returns the confirmed one."""
    crossing = state.crossing
    if crossing is not None:
        crossing = replace(crossing, values=(*crossing.values, value))
        if len(crossing.values) >= settings.giving_up_values:
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
    threshold = math.log(settings.growth) + _floor_of_bounces(state, baseline, settings)
    if value < threshold:
        return state, None
    return replace(state, crossing=Crossing(step, baseline, threshold, (value,))), None


def _baseline(state: SurgeState, step: int, noise: float, settings: SurgeSettings) -> float | None:
    """The median log length before the growth window, over a span as long as the window; None while warming."""
    needed = settings.baseline(noise)
    if len(state.values) < needed:
        return None
    window = settings.window(step)
    before = bisect_right(state.steps, step - window)
    span = before - bisect_left(state.steps, step - 2 * window)
    last = max(before, needed)
    return median(state.values[last - max(span, needed) : last])


def _floor_of_bounces(state: SurgeState, baseline: float, settings: SurgeSettings) -> float:
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


def _sign_of(
    state: SurgeState,
    step: int,
    value: float,
    noise: float,
    crossing: Crossing,
    corroborated: bool,
    settings: SurgeSettings,
) -> SurgeSign:
    early = crossing.step <= settings.early_surge_step
    kind: SurgeKind = "surge"
    effective = True
    if state.effective_surge_step is not None:
        kind, effective = "surge_again", False
    elif early:
        kind, effective = "early_surge", corroborated
    return SurgeSign(kind, step, crossing.step, _tokens(value), _tokens(crossing.baseline), noise, effective)


def _advance_ramp(
    state: SurgeState, step: int, noise: float, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeSign, ...]]:
    """Report a doubling that took longer than the growth window, and move the anchor up to it."""
    if state.anchor is None or state.crossing is not None:
        return state, ()
    if state.last_confirmed_step is not None and step <= state.last_confirmed_step + settings.quiet_steps:
        # The rest of a surge's own rise is no ramp.
        return replace(state, anchor=max(state.anchor, _level(state, settings))), ()
    needed = max(settings.smoothing_values, settings.confirmation(noise))
    if len(state.values) < 2 * needed or step <= state.anchor_step + settings.window(step):
        return state, ()
    level = median(state.values[-needed:])
    if level < math.log(settings.growth) + _floor_of_bounces(state, state.anchor, settings):
        return state, ()
    sign = SurgeSign("ramp", step, step, _tokens(level), _tokens(state.anchor), noise, effective=False)
    return replace(state, anchor=level, anchor_step=step), (sign,)


def _tokens(log_length: float) -> float:
    """Without the rounding errors of a logarithm and back: 50, not 49.99999999999999."""
    return float(f"{math.exp(log_length):.10g}")


def _corroborate(
    state: SurgeState, step: int, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeSign, ...]]:
    """Make an early surge effective once a mismatch or gradient signal stands, or forget that it waits."""
    pending = state.pending
    if pending is None or state.effective_surge_step is not None:
        return replace(state, pending=None), ()
    if step > pending.step + settings.corroboration_steps:
        return replace(state, pending=None), ()
    if not corroborated:
        return state, ()
    sign = replace(pending, kind="surge", step=step, effective=True)
    return replace(state, pending=None, effective_surge_step=pending.surge_step), (sign,)
