"""`advance` over many closed steps at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foreshock.early_warning.detectors import (
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    LONGEST_KEY,
    RATE_UNIT_BITS,
    REWARD_KEY,
    TRUNCATED_KEY,
    WarningConfiguration,
    WarningState,
    advance,
    rate_units_after,
)
from foreshock.early_warning.events import Event
from foreshock.early_warning.rules import LAG_KEY
from foreshock.early_warning.stretches.columns import ClosedSteps, firing_flags
from foreshock.early_warning.stretches.reward import reward_over
from foreshock.early_warning.stretches.rules import rules_over
from foreshock.early_warning.stretches.surge import Lengths, surge_over
from foreshock.early_warning.surge_events import event_of
from foreshock.json_values import finite_or_none

_FEWEST_STEPS = 8
"""For fewer steps, arrays take longer than the steps themselves."""

_LARGEST_LAG = 2**53


def advance_over(
    state: WarningState, steps: ClosedSteps, configuration: WarningConfiguration
) -> tuple[WarningState, list[Event]]:
    """Return the state and all events of `advance` over the steps, in order; both are equal bit for bit.

    Raises ValueError if steps do not ascend.
    """
    before = -1 if state.step is None else state.step
    descends = np.flatnonzero(np.diff(steps.steps, prepend=before) <= 0).tolist()
    if descends:
        raise ValueError(f"steps must ascend, got step {steps.steps[descends[0]]} after step {before} or a later one")
    events: list[Event] = []
    for first, end in pairwise(_cuts(state, steps, configuration)):
        part = steps.part(first, end)
        over = _one_by_one if state.step is None or end - first < _FEWEST_STEPS else _stretch
        state, new = over(state, part, configuration)
        events += new
    return state, events


def _cuts(state: WarningState, steps: ClosedSteps, configuration: WarningConfiguration) -> list[int]:
    """Return the indices between which rules and baselines stay; a step that changes them is alone."""
    changes = [change.first_step for change in configuration.changed_rules]
    alone = {int(np.searchsorted(steps.steps, first)) for first in changes}
    alone |= set(np.flatnonzero(np.isin(steps.steps, list(steps.rebaseline))).tolist())
    lags = steps.column(LAG_KEY)
    alone |= set(np.flatnonzero(np.isfinite(lags) & (np.abs(lags) > _LARGEST_LAG)).tolist())
    if state.step is None:
        alone.add(0)
    bounds = {0, len(steps)} | {each for index in alone if index < len(steps) for each in (index, index + 1)}
    return sorted(bounds)


def _one_by_one(
    state: WarningState, steps: ClosedSteps, configuration: WarningConfiguration
) -> tuple[WarningState, list[Event]]:
    events: list[Event] = []
    for index in range(len(steps)):
        state, new = advance(state, steps.at(index), configuration)
        events += new
    return state, events


def _stretch(
    state: WarningState, steps: ClosedSteps, configuration: WarningConfiguration
) -> tuple[WarningState, list[Event]]:
    """Advance over steps of one set of rules, without a change that was announced."""
    last = int(steps.steps[-1])
    rewards = steps.column(REWARD_KEY)
    reward, falls, learning = reward_over(state.reward, steps, rewards, configuration.reward)
    rules = rules_over(state.rules, steps, configuration.rules_at(last), learning)
    corroborated = rules.corroborated | firing_flags(len(steps), state.reward.fired_step is not None, falls)
    lengths = Lengths(
        steps.column(LENGTH_KEY),
        steps.column(LONGEST_KEY),
        steps.column(TRUNCATED_KEY),
        rewards,
    )
    surge, detections = surge_over(state.surge, steps, lengths, corroborated, configuration.surge)
    rates = [finite_or_none(rate) for rate in steps.column(LEARNING_RATE_KEY).tolist()]
    units = _rate_units(state, steps.steps.tolist(), rates)
    placed = [(index, 0, event) for index, event in rules.events] + [(index, 1, event) for index, event in falls]
    for index, each in detections:
        known = units[index]
        total = None if known is None else known / 2**RATE_UNIT_BITS
        schedule = configuration.schedule_at(each.surge_step)
        placed.append((index, 2, event_of(each, configuration.surge, schedule, total, rates[index])))
    placed.sort(key=lambda each: each[:2])
    return WarningState(last, surge, rules.state, reward, units[-1]), [event for _, _, event in placed]


def _rate_units(state: WarningState, steps: Sequence[int], rates: Sequence[float | None]) -> list[int | None]:
    """Return Σ η after each step, in its units."""
    found: list[int | None] = []
    units, before = state.rate_units, state.step
    for step, rate in zip(steps, rates, strict=True):
        units = rate_units_after(units, 1 if before is None else step - before, rate)
        found.append(units)
        before = step
    return found
