"""The rules over a stretch: each alone, as rules depend on each other by nothing but a baseline that follows learning.

A rule is quiet if it does not fire at the start and, counted over the whole stretch, was never beyond its threshold
long enough; a rule that pools steps, if its evidence was not enough at any value beyond. A rule that is not quiet is
looked at in halves of the stretch, and goes step by step over a short one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.early_warning.events import Event
from foreshock.early_warning.pooling import MEDIAN_VALUES
from foreshock.early_warning.rules import (
    LAG_KEY,
    NEWEST,
    RulesState,
    RuleState,
    advance_each,
    name_of_baseline,
    with_episodes,
)
from foreshock.early_warning.stretches.columns import ClosedSteps, Flags, Floats, firing_flags, rolling_median, runs_of
from foreshock.early_warning.stretches.evidence import evidence_over
from foreshock.early_warning.stretches.reward import Learning
from foreshock.early_warning.threshold_rule import BASELINE_VALUES, Baseline, ThresholdRule

MOST_LAGS = 8
"""Lags of a stretch that have thresholds of their own; with more, its rules go step by step."""

FEW_STEPS = 100
"""A rule that is not quiet goes step by step over so many: halving them further takes as long."""

Placed = tuple[int, int, Event]
"""An event with the index of its step and the place of its rule."""


@dataclass(frozen=True, slots=True)
class RulesOver:
    """The state after a stretch, the events at its steps, each with its step's index, in order; and after which steps a
    rule fires that corroborates a surge, shape [N]."""

    state: RulesState
    events: list[tuple[int, Event]]
    corroborated: Flags


def rules_over(
    state: RulesState, steps: ClosedSteps, rules: tuple[ThresholdRule, ...], learning: Learning
) -> RulesOver:
    """Return what `advance_rules` gives at each of the steps, of one set of rules."""
    after, found = _advance(state, steps, rules, learning)
    corroborated = np.zeros(len(steps), dtype=np.bool_)
    for place, rule in enumerate(rules):
        if rule.corroborates_surge:
            events = [(index, event) for index, of_rule, event in found if of_rule == place]
            corroborated |= firing_flags(len(steps), state.firing(rule) is not None, events)
    episodes, events = _with_episodes(state, rules, found)
    return RulesOver(RulesState(after.rules, after.baselines, episodes), events, corroborated)


def _advance(
    state: RulesState, steps: ClosedSteps, rules: tuple[ThresholdRule, ...], learning: Learning
) -> tuple[RulesState, list[Placed]]:
    """Return the rules' states and baselines after the steps, without episodes, and the events in order."""
    lags = _lags(steps.column(LAG_KEY))
    states, baselines = dict(state.rules), dict(state.baselines)
    found: list[Placed] = []
    for places in _groups(rules):
        group = tuple(rules[place] for place in places)
        known = _baselines_of(state.baselines, group[0])
        changed = _baselines_after(known, steps, group[0], lags)
        alone: list[tuple[int, ...]] = []
        for place, rule in zip(places, group, strict=True):
            before = state.rules.get(rule.name)
            after = None if changed is None else _quiet(rule, before or RuleState(), steps, lags, known, changed)
            if after is None:
                alone.append((place,))
            elif after.measured:
                states[rule.name] = after.state
        together = changed is None or any(rules[place].follows_learning for (place,) in alone)
        if alone and together:
            # The baseline itself may follow the values, and all rules of the group have it.
            alone = [places]
        for these in alone:
            chosen = tuple(rules[place] for place in these)
            one = RulesState({name: each for name in _names(chosen) if (each := state.rules.get(name))}, known, {})
            advance = _each_step if together or len(steps) <= FEW_STEPS else _each_half
            one, events = advance(one, steps, chosen, learning)
            states |= one.rules
            baselines |= one.baselines
            found += [(index, these[place], event) for index, place, event in events]
        if changed is not None and places not in alone:
            baselines |= changed
    found.sort(key=lambda each: each[:2])
    return RulesState(states, baselines, {}), found


def _each_half(
    state: RulesState, steps: ClosedSteps, rules: tuple[ThresholdRule, ...], learning: Learning
) -> tuple[RulesState, list[Placed]]:
    """Advance some rules over both halves of the steps."""
    half = len(steps) // 2
    state, found = _advance(state, steps.part(0, half), rules, learning)
    state, later = _advance(state, steps.part(half, len(steps)), rules, lambda index: learning(half + index))
    return state, found + [(half + index, place, event) for index, place, event in later]


@dataclass(frozen=True, slots=True)
class _Quiet:
    state: RuleState
    measured: bool


def _names(rules: Sequence[ThresholdRule]) -> list[str]:
    return [rule.name for rule in rules]


def _lags(values: Floats) -> NDArray[np.int64]:
    """Return the lag of each step as `advance_rules` rounds it."""
    return np.array([round(value) if math.isfinite(value) else 0 for value in values.tolist()], dtype=np.int64)


def _groups(rules: Sequence[ThresholdRule]) -> list[tuple[int, ...]]:
    """Return the places of the rules that share a baseline."""
    groups: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for place, rule in enumerate(rules):
        groups[rule.baseline_name, rule.reference is not None].append(place)
    return [tuple(each) for each in groups.values()]


def _baselines_of(baselines: Mapping[str, Baseline], rule: ThresholdRule) -> dict[str, Baseline]:
    """Return the rule's baselines of all lags."""
    if rule.reference is not None:
        name = name_of_baseline(rule, 0)
        return {name: baselines[name]} if name in baselines else {}
    newest = f"{rule.baseline_name}@{NEWEST}"
    own = (item for item in baselines.items() if item[0].rpartition("@")[0] == rule.baseline_name)
    return {name: each for name, each in own if name != newest}


def _baselines_after(
    known: Mapping[str, Baseline], steps: ClosedSteps, rule: ThresholdRule, lags: NDArray[np.int64]
) -> dict[str, Baseline] | None:
    """Return the rule's baselines after the steps, unless values of learning enter them; None: not by arrays."""
    if rule.reference is not None:
        return None if np.isfinite(steps.column(rule.reference)).any() else dict(known)
    values = steps.column(rule.quantity)
    measured = np.isfinite(values)
    found = dict(known)
    distinct = np.unique(lags[measured]).tolist()
    if len(distinct) > MOST_LAGS:
        return None
    for lag in distinct:
        name = name_of_baseline(rule, lag)
        baseline = found.get(name, Baseline())
        if not baseline.ready:
            of_lag: Any = values[measured & (lags == lag)]
            added: Any = rule.measure(of_lag)
            positive: Floats = added[added > 0.0]
            for value in positive[: BASELINE_VALUES - len(baseline.logs)].tolist():
                baseline = baseline.with_value(value)
        found[name] = baseline
    return found


def _quiet(
    rule: ThresholdRule,
    state: RuleState,
    steps: ClosedSteps,
    lags: NDArray[np.int64],
    known: Mapping[str, Baseline],
    changed: Mapping[str, Baseline],
) -> _Quiet | None:
    """Return the rule's state after the steps if it neither fires nor clears; None if that needs a closer look."""
    if state.fired_step is not None:
        return None
    values = steps.column(rule.quantity)
    chosen = np.isfinite(values)
    if rule.lag_zero_only:
        chosen &= lags == 0
    thresholds, levels = np.zeros(len(steps)), np.full(len(steps), np.inf)
    at_baseline = rule.key.endswith("@baseline")
    for lag in np.unique(lags[chosen]).tolist():
        name = name_of_baseline(rule, lag)
        before, after = known.get(name), changed.get(name)
        becomes_ready = after is not None and after.ready and (before is None or not before.ready)
        if becomes_ready and (rule.relative is not None or at_baseline):
            return None
        threshold = rule.threshold(before)
        here = lags == lag
        if threshold is None or (at_baseline and (before is None or not before.ready)):
            chosen &= ~here
            continue
        thresholds[here] = threshold
        if at_baseline and before is not None:
            levels[here] = before.level
    if not chosen.any():
        return _Quiet(state, measured=False)
    # The rule's own comparisons, which are those of arrays as well.
    limits: Any = thresholds[chosen]
    of_steps: Any = values[chosen]
    measured: Any = np.minimum(levels[chosen], rule.measure(of_steps))
    return _quiet_of(rule, state, values[chosen], measured, limits)


def _quiet_of(rule: ThresholdRule, state: RuleState, values: Floats, measured: Any, limits: Any) -> _Quiet | None:
    evidence = state.evidence
    if rule.pooled == "median":
        if len(evidence) < MEDIAN_VALUES - 1:
            return None
        count = len(measured)
        newest = np.concatenate((evidence, measured))[-(count + MEDIAN_VALUES - 1) :]
        evidence = tuple(newest[-MEDIAN_VALUES:].tolist())
        measured = rolling_median(newest, MEDIAN_VALUES)
    beyond: Any = rule.is_beyond(measured, limits)
    longest, last = runs_of(beyond, state.beyond)
    if rule.pooled == "mean" or rule.pooled == "deviation":
        # Deviations keep their sign.
        pooled = values - rule.ideal if rule.pooled == "deviation" else measured
        found = evidence_over(evidence, rule.pooled, pooled, limits, beyond)
        if found is None:
            return None
        evidence = found
    elif longest >= (1 if rule.pooled == "median" or rule.follows_learning else rule.minimum_duration):
        return None
    back: Any = rule.is_back(measured, limits)
    _, back_in_a_row = runs_of(back, state.back)
    duration = rule.minimum_duration
    after = RuleState(min(last, duration), min(back_in_a_row, duration), None, state.cleared_step, evidence)
    return _Quiet(after, measured=True)


def _each_step(
    state: RulesState, steps: ClosedSteps, rules: tuple[ThresholdRule, ...], learning: Learning
) -> tuple[RulesState, list[Placed]]:
    """Advance some rules step by step."""
    by_name = {rule.name: place for place, rule in enumerate(rules)}
    keys = {LAG_KEY, *(key for rule in rules for key in rule.keys)}
    columns = {key: steps.columns[key] for key in sorted(keys) if key in steps.columns}
    read = [key for key in columns if key != LAG_KEY or any(LAG_KEY in rule.keys for rule in rules)]
    measured = np.zeros(len(steps), dtype=np.bool_)
    for key in read:
        measured |= np.isfinite(columns[key])
    places = np.flatnonzero(measured)
    rows = zip(*(column[places].tolist() for column in columns.values()), strict=True)
    found: list[Placed] = []
    for index, step, row in zip(places.tolist(), steps.steps[places].tolist(), rows, strict=True):
        values = dict(zip(columns, row, strict=True))
        states, baselines, events = advance_each(state, step, values, rules, lambda: learning(index))  # noqa: B023
        state = RulesState(states, baselines, {})
        found += [(index, by_name[event.rule], event) for event in events]
    return state, found


def _with_episodes(
    state: RulesState, rules: Sequence[ThresholdRule], found: Sequence[Placed]
) -> tuple[dict[str, int], list[tuple[int, Event]]]:
    """Return the episodes after the events, and the events with theirs."""
    firing = {name: each.fired_step for name, each in state.rules.items() if each.fired_step is not None}
    episodes, done = dict(state.episodes), list[tuple[int, Event]]()
    by_index: defaultdict[int, list[Event]] = defaultdict(list)
    for index, _, event in found:
        by_index[index].append(event)
    for index, events in by_index.items():
        for event in events:
            if event.change == "fired":
                firing[event.rule] = event.step
            else:
                firing.pop(event.rule, None)
        episodes, finished = with_episodes(episodes, firing, rules, events)
        done += [(index, event) for event in finished]
    return episodes, done
