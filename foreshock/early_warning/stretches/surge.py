"""The detector of the length surge over a stretch.

It is quiet if no crossing is open and no value opens one, the lengths are not at their cap, and no ramp is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshock.early_warning.stretches.columns import ClosedSteps, Flags, Floats, rolling_median
from foreshock.early_warning.surge import advance_surge, opens_crossing
from foreshock.early_warning.surge_settings import SurgeSettings
from foreshock.early_warning.surge_state import StepLengths, SurgeDetection, SurgeState
from foreshock.json_values import finite_or_none


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the detector reads of each step, as `StepLengths`: shape [N] each, NaN for a missing value."""

    mean: Floats
    longest: Floats
    truncated: Floats
    reward: Floats


def surge_over(
    state: SurgeState, steps: ClosedSteps, lengths: Lengths, corroborated: Flags, settings: SurgeSettings
) -> tuple[SurgeState, list[tuple[int, SurgeDetection]]]:
    """Return the state after the steps, and the detections, each with its step's index.

    `corroborated` says after which steps a rule fires that corroborates a surge, shape [N].
    """
    after = _quiet(state, steps, lengths, settings)
    if after is not None:
        return after, []
    found: list[tuple[int, SurgeDetection]] = []
    columns = (lengths.mean, lengths.longest, lengths.truncated, lengths.reward)
    rows = zip(steps.steps.tolist(), corroborated.tolist(), *(column.tolist() for column in columns), strict=True)
    for index, (step, corroborates, *values) in enumerate(rows):
        state, detections = advance_surge(state, step, StepLengths(*values), corroborates, settings)
        found += [(index, each) for each in detections]
    return state, found


def _quiet(state: SurgeState, steps: ClosedSteps, lengths: Lengths, settings: SurgeSettings) -> SurgeState | None:
    """Return the state after the steps if nothing is detected, None if that needs a closer look."""
    if state.crossing is not None or state.pending is not None or state.anchor is None or state.armed_since is None:
        return None
    if len(state.values) < settings.kept_values or state.capped:
        return None
    measured = np.isfinite(lengths.mean) & (lengths.mean >= 0.0)
    if not measured.any():
        return replace(state, missing=state.missing + len(steps))
    numbers: list[int] = steps.steps[measured].tolist()
    if state.last_confirmed_step is not None and numbers[0] <= state.last_confirmed_step + settings.quiet_steps:
        return None
    means = lengths.mean[measured]
    caps = _caps(state, lengths, measured)
    truncated = lengths.truncated[measured]
    # A comparison with NaN is false: a missing value is not at the cap.
    if np.any((truncated >= settings.truncated_at_cap) | (means >= settings.fraction_of_cap * caps)):
        return None
    window = _Window(state, numbers, means.tolist(), lengths.reward[measured].tolist(), settings)
    if window.ramps(state) or window.opens(state):
        return None
    missing = int(len(measured) - 1 - np.flatnonzero(measured)[-1])
    cap = None if math.isnan(caps[-1]) else float(caps[-1])
    return replace(window.state_before(state, len(window.steps)), cap=cap, missing=missing)


def _caps(state: SurgeState, lengths: Lengths, measured: Flags) -> Floats:
    """Return the known cap at each step with a length: that of the newest truncated response; NaN before any."""
    truncated, longest = lengths.truncated[measured], lengths.longest[measured]
    known = np.isfinite(truncated) & (truncated > 0.0) & np.isfinite(longest)
    values = np.concatenate(([np.nan if state.cap is None else state.cap], longest))
    places = np.maximum.accumulate(np.concatenate(([0], np.where(known, np.arange(1, known.size + 1), 0))))
    found: Floats = values[places][1:]
    return found


class _Window:
    """The kept values of the detector at each new step: those of the state, followed by the new ones.

    `lowest[i]` is the place of the first value that is kept after the value at place i.
    """

    def __init__(
        self,
        state: SurgeState,
        numbers: Sequence[int],
        means: Sequence[float],
        rewards: Sequence[float],
        settings: SurgeSettings,
    ) -> None:
        self.settings = settings
        self.first = len(state.steps)
        self.steps = (*state.steps, *numbers)
        # By `math`, whose last digit may differ from that of arrays.
        self.values = (*state.values, *[math.log(max(mean, 1.0)) for mean in means])
        self.rewards = (*state.rewards, *[finite_or_none(reward) for reward in rewards])
        places = np.arange(len(self.steps))
        steps = np.array(self.steps)
        oldest = np.searchsorted(steps, steps - 2 * settings.maximum_window)
        lowest = np.maximum(np.minimum(oldest, places + 1 - settings.kept_values), 0)
        lowest[: self.first] = 0
        self.lowest = lowest
        levels = rolling_median(np.array(self.values), settings.smoothing_values)
        before, now = lowest[self.first - 1 : -1], lowest[self.first :]
        dropped = np.where(now > before, levels[np.maximum(now - 1, 0)], -np.inf)
        high = -np.inf if state.high_water is None else state.high_water
        self.high_water = np.maximum(np.maximum.accumulate(dropped), high)
        self.levels = levels[self.first - settings.smoothing_values + 1 :]

    def state_before(self, state: SurgeState, place: int) -> SurgeState:
        """Return the state before the value at a place: `place` many values are known."""
        first = int(self.lowest[place - 1])
        high = state.high_water if place == self.first else float(self.high_water[place - 1 - self.first])
        return replace(
            state,
            steps=self.steps[first:place],
            values=self.values[first:place],
            rewards=self.rewards[first:place],
            high_water=None if high == -math.inf else high,
        )

    def ramps(self, state: SurgeState) -> bool:
        """Return whether a ramp may be reported."""
        assert state.anchor is not None
        high = np.flatnonzero(self.levels >= state.anchor + self.settings.log_growth).tolist()
        steps = (self.steps[self.first + index] for index in high)
        return any(step > state.anchor_step + self.settings.window(step) for step in steps)

    def opens(self, state: SurgeState) -> bool:
        """Return whether a value opens a crossing."""
        # The places of the kept values, of which none is both earlier and not lower than another.
        lowest = deque[int]()
        growth, values = self.settings.log_growth, self.values
        for place, value in enumerate(values):
            if place >= self.first:
                while lowest[0] < self.lowest[place - 1]:
                    lowest.popleft()
                if value >= values[lowest[0]] + growth:
                    before = self.state_before(state, place)
                    if opens_crossing(before, self.steps[place], value, self.settings):
                        return True
            while lowest and values[lowest[-1]] >= value:
                lowest.pop()
            lowest.append(place)
        return False
