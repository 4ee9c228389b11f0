"""Alarms to compare with, at an equal number of alarms: a clock, circularly shifted alarms, "3× of the first 50"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreshock.backtest.replay import Episode, RecordedRun
from foreshock.backtest.scoring import Score, score, warnings_of
from foreshock.early_warning.detectors import LENGTH_KEY, ClosedStep

SHIFTS = 20
BASELINE_STEPS = 50


def compared(runs: Sequence[RecordedRun], steps: Sequence[Sequence[ClosedStep]]) -> list[Score]:
    """Return the scores of the three baselines; ``steps`` are those of each run."""
    alarms = [warnings_of(run) for run in runs]
    total, observations = sum(map(len, alarms)), sum(len(run.steps) for run in runs)
    scores = []
    if total:
        period = max(observations // total, 1)
        scores.append(score(f"clock, every {period} observations", runs, [_clock(run, period) for run in runs]))
        pairs = list(zip(runs, alarms, strict=True))
        shifted = [_shifted(run, mine, shift) for shift in range(1, SHIFTS + 1) for run, mine in pairs]
        scores.append(score(f"alarms shifted circularly, {SHIFTS} times", [*runs] * SHIFTS, shifted))
    # At most one alarm a run: its budget is its own.
    threefold = [_threefold(each) for each in steps]
    scores.append(score("lengths of 3× the mean of the first 50", runs, threefold))
    return scores


def _clock(run: RecordedRun, period: int) -> list[Episode]:
    return [_alarm("clock", step) for step in run.steps[period - 1 :: period]]


def _shifted(run: RecordedRun, episodes: Sequence[Episode], shift: int) -> list[Episode]:
    count = len(run.steps)
    by = shift * count // (SHIFTS + 1)
    places = [run.steps.index(episode.start) for episode in episodes]
    return [
        replace(episode, start=run.steps[(place + by) % count], end=run.steps[(place + by) % count])
        for episode, place in zip(episodes, places, strict=True)
    ]


def _threefold(steps: Sequence[ClosedStep]) -> list[Episode]:
    lengths = [(step.step, step.values[LENGTH_KEY]) for step in steps if LENGTH_KEY in step.values]
    first = [length for _, length in lengths[:BASELINE_STEPS]]
    if len(first) < BASELINE_STEPS:
        return []
    threshold = 3.0 * sum(first) / len(first)
    crossed = next((step for step, length in lengths[BASELINE_STEPS:] if length > threshold), None)
    return [] if crossed is None else [_alarm("threefold", crossed)]


def _alarm(rule: str, step: int) -> Episode:
    return Episode(rule, "warning", step, step)
