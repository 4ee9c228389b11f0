"""Scores of a rule's alarms on recorded runs: hits, misses, lead times and false alarms, with exact intervals.

Definitions are those of `foreshock.diagnosis.collapse`. An alarm after the last step of the window, three steps before
a collapse, is neither a hit nor false: it is late. A run whose collapse leaves no baseline is no miss, and nothing from
its window on counts.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from foreshock.backtest.replay import Episode, RecordedRun, lost_learning_rate, replay_run, scales_under_apply
from foreshock.diagnosis.collapse import hit_window
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.statistics import poisson_interval, proportion_interval

RESAMPLES = 2_000

ALL_WARNINGS = "any warning or critical"
"""Episodes of rules with one cause that overlap count once."""

LOWERS_RATE = "any that lowers the learning rate"
"""Episodes on which a trainer that follows the advice acts, counted as those of `ALL_WARNINGS`."""


@dataclass(frozen=True, slots=True)
class Score:
    """A rule's score. Rates are per 1,000 armed observations; intervals are exact 95 % ones."""

    rule: str
    hits: int
    misses: int
    hit_rate_interval: tuple[float, float]
    leads: tuple[int, ...]
    false_alarms: int
    armed_observations: int
    false_alarms_per_1000: float
    false_alarms_per_1000_interval: tuple[float, float]
    healthy_observations: int
    healthy_share_in_alarm: float
    healthy_share_in_alarm_interval: tuple[float, float]

    @property
    def median_lead(self) -> float | None:
        """Steps from the first hit to the collapse, in the median over hit collapses."""
        return median([float(lead) for lead in self.leads]) if self.leads else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"median_lead": self.median_lead}


def score(rule: str, runs: Sequence[RecordedRun], episodes: Sequence[Sequence[Episode]]) -> Score:
    """Return the score of one rule's ``episodes``, a sequence for each run."""
    hits, misses, false, armed = 0, 0, 0, 0
    leads: list[int] = []
    times: list[tuple[int, int]] = []
    for run, mine in zip(runs, episodes, strict=True):
        window = hit_window(run.collapse) if run.collapse is not None else None
        if window is not None and run.usable:
            starts = [episode.start for episode in mine if window.holds(episode.start)]
            hits, misses = hits + bool(starts), misses + (not starts)
            leads.extend([run.collapse - min(starts)] if starts and run.collapse is not None else [])
        false += sum(window is None or episode.start < window.first for episode in mine)
        # Steps ascend: the healthy ones come first.
        well = len(run.steps) if window is None else bisect_left(run.steps, window.first)
        armed += sum(run.armed[:well])
        times.append((sum(any(each.holds(step) for each in mine) for step in run.steps[:well]) if mine else 0, well))
    alarmed, healthy = sum(each[0] for each in times), sum(each[1] for each in times)
    low, high = poisson_interval(false)
    scale = 1000.0 / armed if armed else 0.0
    return Score(
        rule=rule,
        hits=hits,
        misses=misses,
        hit_rate_interval=proportion_interval(hits, hits + misses),
        leads=tuple(leads),
        false_alarms=false,
        armed_observations=armed,
        false_alarms_per_1000=false * scale,
        false_alarms_per_1000_interval=(low * scale, high * scale),
        healthy_observations=healthy,
        healthy_share_in_alarm=alarmed / healthy if healthy else 0.0,
        healthy_share_in_alarm_interval=_share_interval(times),
    )


def scores_of(runs: Sequence[RecordedRun]) -> list[Score]:
    """Return the scores of all warning-level rules together, of those among them that lower the learning rate, and of
    each rule that fired."""
    together = {ALL_WARNINGS: [warnings_of(run) for run in runs], LOWERS_RATE: [lowering_of(run) for run in runs]}
    rules = sorted({episode.rule for run in runs for episode in run.episodes})
    alarms = {rule: [[each for each in run.episodes if each.rule == rule] for run in runs] for rule in rules}
    return [score(rule, runs, mine) for rule, mine in (together | alarms).items()]


def _share_interval(times: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval, over runs, of the share of (steps in alarm, steps); (0, 1) for one run."""
    if len(times) < 2:
        return 0.0, 1.0
    counts = np.asarray(times, dtype=np.float64)
    drawn = np.random.default_rng(len(times)).integers(len(times), size=(RESAMPLES, len(times)))
    sums = counts[drawn].sum(axis=1)
    shares = sums[:, 0] / np.maximum(sums[:, 1], 1.0)
    low, high = np.quantile(shares, (0.025, 0.975))
    return float(low), float(high)


def warnings_of(run: RecordedRun) -> list[Episode]:
    """Return the warning-level episodes of a run; those of one cause that overlap are one."""
    return _merged(episode for episode in run.episodes if episode.severity in ("warning", "critical"))


def lowering_of(run: RecordedRun) -> list[Episode]:
    """Return the episodes for which the advice may lower the learning rate, merged as those of `warnings_of`."""
    return _merged(episode for episode in run.episodes if episode.lowers_rate)


def _merged(episodes: Iterable[Episode]) -> list[Episode]:
    """Return the episodes in the order of their starts, one for each stretch of steps in which a cause is in alarm."""
    last: dict[str, int] = {}
    found: list[Episode] = []
    for episode in sorted(episodes, key=lambda each: each.start):
        cause = episode.cause or episode.rule
        place = last.get(cause)
        if place is not None and found[place].holds(episode.start):
            end = found[place].end
            longest = None if end is None or episode.end is None else max(end, episode.end)
            found[place] = replace(found[place], end=longest)
            continue
        last[cause] = len(found)
        found.append(episode)
    return found


@dataclass(frozen=True, slots=True)
class RunResult:
    """A replayed run, and the share of its Σ η that the advice would have taken away in `apply` mode."""

    run: RecordedRun
    lost: float

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "name": run.name,
            "steps": len(run.steps),
            "collapse": run.collapse,
            "usable": run.usable,
            "learning_rate_sum_lost": self.lost,
            "episodes": [
                {"rule": each.rule, "severity": each.severity, "start": each.start, "end": each.end}
                for each in run.episodes
            ],
        }


@dataclass(frozen=True, slots=True)
class BacktestResult:
    """The runs, and the scores of the rules."""

    runs: tuple[RunResult, ...]
    rules: tuple[Score, ...]

    def to_json(self) -> dict[str, Any]:
        return {"runs": [each.to_json() for each in self.runs], "rules": [each.to_json() for each in self.rules]}


def backtest(
    names: Sequence[str],
    steps: Sequence[Sequence[ClosedStep]],
    configuration: WarningConfiguration,
    floor: float | None = None,
) -> BacktestResult:
    """Replay the runs, one sequence of steps for each name. ``floor``: the reward of a policy that learned nothing."""
    runs = [replay_run(name, each, configuration, floor) for name, each in zip(names, steps, strict=True)]
    lost = [lost_learning_rate(each, scales_under_apply(each, configuration)) for each in steps]
    return BacktestResult(tuple(RunResult(*each) for each in zip(runs, lost, strict=True)), tuple(scores_of(runs)))
