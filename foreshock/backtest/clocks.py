"""Alarms to compare with, at an equal number of alarms: a clock, circularly shifted alarms, "3× of the first 50"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreshock.backtest.replay import Episode, RecordedRun
from foreshock.backtest.scoring import ALL_WARNINGS, LOWERS_RATE, Score, lowering_of, score, warnings_of
from foreshock.diagnosis.detectors import LENGTH_KEY, ClosedStep

SHIFTS = 20
BASELINE_STEPS = 50
TIMES_BASELINE = 3.0


def compared(runs: Sequence[RecordedRun], steps: Sequence[Sequence[ClosedStep]]) -> list[Score]:
    """Return the scores of the three baselines at the number of alarms of all warnings, of those that lower the
    learning rate, then of each rule.

    ``steps`` are those of each run.
    """
    rules = sorted({each.rule for run in runs for each in warnings_of(run)})
    budgets = [
        (ALL_WARNINGS, [warnings_of(run) for run in runs]),
        (LOWERS_RATE, [lowering_of(run) for run in runs]),
    ]
    budgets += [(rule, [[each for each in run.episodes if each.rule == rule] for run in runs]) for rule in rules]
    return [each for rule, alarms in budgets for each in _at_equal_budget(rule, alarms, runs, steps)]


def _at_equal_budget(
    rule: str,
    alarms: Sequence[Sequence[Episode]],
    runs: Sequence[RecordedRun],
    steps: Sequence[Sequence[ClosedStep]],
) -> list[Score]:
    total, observations = sum(map(len, alarms)), sum(len(run.steps) for run in runs)
    if not total:
        return []
    period = max(observations // total, 1)
    shifted = [
        _shifted(run, mine, shift) for shift in range(1, SHIFTS + 1) for run, mine in zip(runs, alarms, strict=True)
    ]
    return [
        score(f"{rule}: clock, every {period} observations", runs, _clock(runs, period)),
        score(f"{rule}: shifted circularly, {SHIFTS} times", [*runs] * SHIFTS, shifted),
        score(f"{rule}: lengths of 3× the mean of the first 50", runs, _threefold(steps, total)),
    ]


def _clock(runs: Sequence[RecordedRun], period: int) -> list[list[Episode]]:
    """Return the alarms of a clock that goes on from one run to the next, first after half a period."""
    alarms, passed = [], 0
    for run in runs:
        first = (period // 2 - passed) % period
        alarms.append([_alarm("clock", step) for step in run.steps[first::period]])
        passed += len(run.steps)
    return alarms


def _shifted(run: RecordedRun, episodes: Sequence[Episode], shift: int) -> list[Episode]:
    count = len(run.steps)
    by = shift * count // (SHIFTS + 1)
    places = [run.steps.index(episode.start) for episode in episodes]
    return [
        replace(episode, start=run.steps[(place + by) % count], end=run.steps[(place + by) % count])
        for episode, place in zip(episodes, places, strict=True)
    ]


def _threefold(steps: Sequence[Sequence[ClosedStep]], most: int) -> list[list[Episode]]:
    """Return the crossings of each run, the first ones of all runs in turn until there are ``most``."""
    crossings = [_crossings(each) for each in steps]
    kept: list[list[Episode]] = [[] for _ in steps]
    for turn in range(max(map(len, crossings), default=0)):
        for found, mine in zip(crossings, kept, strict=True):
            if turn < len(found) and sum(map(len, kept)) < most:
                mine.append(_alarm("threefold", found[turn]))
    return kept


def _crossings(steps: Sequence[ClosedStep]) -> list[int]:
    """Return the steps at which the length goes beyond three times the mean of the first fifty."""
    lengths = [(step.step, step.values[LENGTH_KEY]) for step in steps if LENGTH_KEY in step.values]
    first = [length for _, length in lengths[:BASELINE_STEPS]]
    if len(first) < BASELINE_STEPS:
        return []
    threshold, above, found = TIMES_BASELINE * sum(first) / len(first), False, list[int]()
    for step, length in lengths[BASELINE_STEPS:]:
        if length > threshold and not above:
            found.append(step)
        above = length > threshold
    return found


def _alarm(rule: str, step: int) -> Episode:
    return Episode(rule, "warning", step, step)
