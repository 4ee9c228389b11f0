"""The detector of a falling reward over a stretch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreshock.early_warning.collapse import floor_of
from foreshock.early_warning.events import Event
from foreshock.early_warning.reward import RewardSettings, RewardState, advance_reward, is_rising
from foreshock.early_warning.stretches.columns import ClosedSteps, Floats, rolling_median

Learning = Callable[[int], bool]
"""Whether the reward rises at the step of an index."""


def reward_over(
    state: RewardState, steps: ClosedSteps, rewards: Floats, settings: RewardSettings
) -> tuple[RewardState, list[tuple[int, Event]], Learning]:
    """Return the state after the steps, their events, each with its index, and whether the reward rises at a step.

    `rewards` has one for each step, shape [N]; those that are not finite are not measured.
    """
    measured = np.isfinite(rewards)
    found = rewards[measured]
    if not found.size:
        return state, [], lambda _: is_rising(state, settings)
    after = _quiet(state, found, settings)
    if after is not None:
        newest, known = (*state.values, *found.tolist()), np.cumsum(measured) + len(state.values)

        def learning(index: int) -> bool:
            end = int(known[index])
            values = newest[max(end - settings.noise_values, 0) : end]
            return is_rising(RewardState(values=values), settings)

        return after, [], learning
    states: list[RewardState] = []
    events: list[tuple[int, Event]] = []
    for index, (step, reward) in enumerate(zip(steps.steps.tolist(), rewards.tolist(), strict=True)):
        state, new = advance_reward(state, step, reward, settings)
        states.append(state)
        events += [(index, event) for event in new]
    return state, events, lambda index: is_rising(states[index], settings)


def _quiet(state: RewardState, found: Floats, settings: RewardSettings) -> RewardState | None:
    """Return the state after these rewards if the reward did not fall, None if that needs a closer look."""
    least = max(settings.smoothing_values, settings.best_values, settings.baseline_values)
    if state.fired_step is not None or state.best is None or state.lowest is None or len(state.values) < least:
        return None
    values = np.array([*state.values, *found.tolist()])
    if np.any((values == 0.0) & np.signbit(values)):
        # Extremes of 0 and −0 depend on which came first.
        return None
    lowest = min(state.lowest, float(found.min()))
    if settings.floor is not None:
        floor = settings.floor
    elif (floor := floor_of(lowest)) != floor_of(state.lowest):
        return None
    level = rolling_median(values, settings.smoothing_values)[-found.size :]
    high = rolling_median(values, settings.best_values)[-found.size :]
    best = np.maximum(np.maximum.accumulate(high), state.best)
    reach, fallen = best - floor, best - level
    if np.any((reach > 0.0) & (fallen >= settings.fall * reach)):
        return None
    newest = tuple(values[-settings.noise_values :].tolist())
    return RewardState(newest, float(best[-1]), lowest, state.back, None)
