"""The detector of a falling reward, and the definition of a collapse.

A reward falls if the smoothed reward is a quarter of the way from its best to the floor. The level is the median of the
newest five rewards, the best the highest median of ten in a row. The fall must also be many standard deviations of the
noise, which is autocorrelated: the best of many noisy levels is high by chance.

A run has collapsed at the first observation from which, for at least ten observations, the median of the trailing five
rewards is below half of (running best + floor): halfway from the best to the reward of a policy that learned nothing.
An alarm episode is a hit if it starts in [t_c − min(200, t_c / 2), t_c − 3]. Backtests and benchmarks use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreshock.diagnosis.rule import Event
from foreshock.diagnosis.statistics import autocorrelated_noise, median, step_noise

RULE = "reward_fall"

MEDIAN_TO_MEAN = 1.25
"""Standard deviation of a median / of a mean, of normal values: √(π / 2)."""


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """The constants of the detector."""

    fall: float = 0.25
    """Fall / (best − floor). A collapse is a fall by half; an alert at half of that leaves time to act."""
    clearing_fall: float = 0.125
    """The alert clears once the fall is this small."""
    z: float = 5.0
    """The fall in standard deviations of the difference of level and best; five, because the best is a maximum of many
    and the level may be at its lowest of many."""
    smoothing_values: int = 5
    """Rewards of a level, as in the definition of a collapse."""
    best_values: int = 10
    """Rewards of a level that may be the best: twice as many, so that noise hardly makes a best."""
    baseline_values: int = 10
    """Rewards before the first fall can be seen; the noise needs some."""
    clearing_values: int = 5
    noise_values: int = 64
    rise_z: float = 3.0
    """The reward rises if the newest values are so many standard deviations above those `rise_values` before."""
    rise_values: int = 20
    """Values between the two levels of a rise: a run that learned some time ago does not rise any more."""
    floor: float | None = None
    """The reward of a policy that learned nothing. None: 0 if no reward was negative, −1 if none was below −1, else
    the lowest level so far."""


@dataclass(frozen=True, slots=True)
class RewardState:
    """The newest rewards, the best and lowest level, and since when the reward is low."""

    values: tuple[float, ...] = ()
    best: float | None = None
    lowest: float | None = None
    back: int = 0
    fired_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"values": list(self.values)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RewardState:
        return cls(**{**value, "values": tuple(value["values"])})


def advance_reward(
    state: RewardState, step: int, reward: float | None, settings: RewardSettings
) -> tuple[RewardState, tuple[Event, ...]]:
    """Return the state after ``step`` and the events at it; a reward that is None or not finite is not measured."""
    if reward is None or not math.isfinite(reward):
        return state, ()
    values = (*state.values, reward)[-settings.noise_values :]
    lowest = reward if state.lowest is None else min(state.lowest, reward)
    state = replace(state, values=values, lowest=lowest)
    if len(values) < settings.smoothing_values:
        return state, ()
    level = median(values[-settings.smoothing_values :])
    best = state.best
    if len(values) >= settings.best_values:
        high = median(values[-settings.best_values :])
        best = high if best is None else max(best, high)
        state = replace(state, best=best)
    if best is None:
        return state, ()
    reach = best - (floor_of(lowest) if settings.floor is None else settings.floor)
    fallen = best - level
    if state.fired_step is not None:
        back = state.back + 1 if fallen <= settings.clearing_fall * reach else 0
        if back < settings.clearing_values:
            return replace(state, back=back), ()
        event = replace(_event(step, level, best, reach, settings), change="cleared", fired_step=state.fired_step)
        return replace(state, back=0, fired_step=None), (event,)
    if len(values) < settings.baseline_values or reach <= 0.0 or fallen < settings.fall * reach:
        return state, ()
    before, newest = values[: -settings.smoothing_values], values[-settings.smoothing_values :]
    noise = autocorrelated_noise([before, newest])
    error = MEDIAN_TO_MEAN * math.hypot(
        noise.deviation_of_mean(settings.smoothing_values), noise.deviation_of_mean(settings.best_values)
    )
    if fallen < settings.z * error:
        return state, ()
    return replace(state, back=0, fired_step=step), (_event(step, level, best, reach, settings),)


def is_rising(state: RewardState, settings: RewardSettings) -> bool:
    """Return whether the newest rewards are above those of some steps before, beyond their step-to-step noise."""
    values = state.values[-settings.rise_values - settings.best_values :]
    if state.fired_step is not None or len(values) < settings.rise_values + settings.smoothing_values:
        return False
    before, newest = values[: settings.best_values], values[-settings.smoothing_values :]
    # Of successive differences: the residuals of a line would take the rise itself for noise.
    noise = MEDIAN_TO_MEAN * step_noise(values)
    error = noise * math.sqrt(1.0 / len(before) + 1.0 / len(newest))
    return median(newest) - median(before) > settings.rise_z * error


def _event(step: int, level: float, best: float, reach: float, settings: RewardSettings) -> Event:
    return Event(
        rule=RULE,
        step=step,
        value=level,
        threshold=best - settings.fall * reach,
        severity="warning",
        why="The smoothed reward has fallen from its best by at least a quarter of what was reached above its floor.",
        what_to_do="Compare with the length, the entropy and the mismatch of the same steps. If the data did not "
        "change, lower the learning rate or go back to a checkpoint before the fall.",
        evidence={
            "key": "rollout:reward_mean",
            "source": "half of the fall by which a collapse is defined, and five standard deviations",
            "best": best,
            "fall": (best - level) / reach if reach > 0.0 else 0.0,
        },
    )


TRAILING_VALUES = 5
HELD_OBSERVATIONS = 10
LONGEST_LEAD = 200
SHORTEST_LEAD = 3

BASELINE_OBSERVATIONS = 10
"""A run that collapses within so many observations has no baseline: its collapse is unusable for a lead time."""


@dataclass(frozen=True, slots=True)
class HitWindow:
    """The steps, both included, at which an episode may start to be a hit."""

    first: float
    last: int

    def holds(self, step: int) -> bool:
        """Return whether an episode that starts at ``step`` is a hit."""
        return self.first <= step <= self.last


def collapse_step(steps: Sequence[int], rewards: Sequence[float], floor: float) -> int | None:
    """Return the step t_c of the collapse, None if the run did not collapse. ``steps`` and ``rewards`` have one length;
    ``floor`` is the reward of a policy that learned nothing."""
    best, held = None, 0
    for index in range(len(rewards)):
        level = median(rewards[max(index - TRAILING_VALUES + 1, 0) : index + 1])
        best = level if best is None else max(best, level)
        held = held + 1 if level < 0.5 * (best + floor) else 0
        if held == HELD_OBSERVATIONS:
            return steps[index - HELD_OBSERVATIONS + 1]
    return None


def floor_of(lowest: float) -> float:
    """Return the floor of rewards whose lowest is ``lowest`` if none is documented: 0, −1, or the lowest one."""
    if lowest >= 0.0:
        return 0.0
    return -1.0 if lowest >= -1.0 else lowest


def hit_window(collapse: int) -> HitWindow:
    """Return the steps at which an alarm is a hit of a collapse at step ``collapse``."""
    return HitWindow(collapse - min(LONGEST_LEAD, collapse / 2), collapse - SHORTEST_LEAD)
