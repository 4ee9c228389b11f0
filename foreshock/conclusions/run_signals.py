"""Conclusions from a run's reward and lengths: whether the reward has collapsed, since when, and what changed with it.

The mismatch alone does not tell whether a run learns: with a learning rate that is too high a run can end
while its log-probs stay healthy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.early_warning.collapse import HELD_OBSERVATIONS, TRAILING_VALUES, collapse_step, floor_of
from foreshock.early_warning.noise import autocorrelated_noise
from foreshock.early_warning.robust import median

__all__ = ["LEAST_VALUES", "NEWEST_VALUES", "RewardFall", "RunSignals", "SteppedValues", "reward_fall"]

LEAST_VALUES = HELD_OBSERVATIONS + TRAILING_VALUES
"""With fewer values of the reward a collapse can neither be seen nor ruled out."""

NEWEST_VALUES = 10
"""The newest values whose median is "now", as many as the steps that the mismatch is pooled over."""

LEAST_Z = 4.0
"""Standard deviations between the level before and since the fall. The split is chosen among all steps: over 1,000
values of noise the largest such difference exceeds 4 in about 1 of 200 runs (Worsley 1979)."""

MOST_BEFORE = 20
"""Values before the fall that its level is taken from: longer, a rising reward would have a level below its best."""

MOST_AFTER = 64
"""Values since the fall that its size is judged by, as many as the detector of falls takes its noise from."""


@dataclass(frozen=True, slots=True)
class SteppedValues:
    """A quantity at ascending steps; values are finite."""

    steps: Sequence[int]
    values: Sequence[float]

    def newest(self) -> float:
        """Return the median of the newest values; NaN without any."""
        return median(list(self.values[-NEWEST_VALUES:])) if self.values else math.nan

    def before(self, step: int) -> float:
        """Return the median of the values just before `step`; NaN without any."""
        earlier = [value for at, value in zip(self.steps, self.values, strict=True) if at < step]
        return median(earlier[-NEWEST_VALUES:]) if earlier else math.nan

    def around(self, step: int) -> float:
        """Return the median of the values of the `NEWEST_VALUES` steps on either side of `step`; NaN without any."""
        near = [value for at, value in zip(self.steps, self.values, strict=True) if abs(at - step) <= NEWEST_VALUES]
        return median(near) if near else math.nan


@dataclass(frozen=True, slots=True)
class RewardFall:
    """A collapse that lasts: `since` its first step below half of the level before, and the levels before and now."""

    since: int
    before: float
    now: float


@dataclass(frozen=True, slots=True)
class RunSignals:
    """What a run's steps tell beside the mismatch; empty series if they are not logged."""

    reward: SteppedValues
    length: SteppedValues
    k3: SteppedValues


def reward_fall(reward: SteppedValues) -> RewardFall | None:
    """Return the collapse of the reward that lasts up to the newest step; None if there is none, or too little data.

    By the definition of `foreshock.early_warning.collapse`, and only if the fall is `LEAST_Z` standard deviations of
    the autocorrelated noise: the best of many noisy levels is twice the usual one by chance.
    """
    steps, values = list(reward.steps), list(reward.values)
    if len(values) < LEAST_VALUES:
        return None
    floor = floor_of(min(values))
    since = collapse_step(steps, values, floor)
    if since is None:
        return None
    split = steps.index(since)
    half = floor + 0.5 * (median(values[max(split - MOST_BEFORE, 0) : split] or [floor]) - floor)
    # A median of five is low two values after the reward is.
    while split > 0 and values[split - 1] < half:
        split -= 1
    before, after = values[max(split - MOST_BEFORE, 0) : split], values[split : split + MOST_AFTER]
    if len(before) < TRAILING_VALUES:
        return None
    high, low = median(before), reward.newest()
    if low - floor >= 0.5 * (high - floor):
        return None
    noise = autocorrelated_noise([before, after])
    error = math.hypot(noise.deviation_of_mean(len(before)), noise.deviation_of_mean(len(after)))
    fallen = sum(before) / len(before) - sum(after) / len(after)
    if fallen < LEAST_Z * error:
        return None
    return RewardFall(steps[split], high, low)
