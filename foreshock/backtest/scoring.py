"""Scores of a rule's alarms on recorded runs: hits, misses, lead times and false alarms, with exact intervals.

Definitions are those of `foreshock.diagnosis.collapse`. An alarm after the last step of the window, three steps before
a collapse, is neither a hit nor false: it is late. A run whose collapse leaves no baseline is no miss, and nothing from
its window on counts.

Rules are compared with alarms that look at nothing, at an equal number of alarms: a clock, circularly shifted alarms,
and "3× of the first 50". The ROC of a rule is hits against false alarms as all thresholds move together by a factor;
corroboration by other rules moves with them, as if an operator made all rules stricter.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from foreshock.backtest.replay import Episode, RecordedRun, lost_learning_rate, replay_run, scales_under_apply
from foreshock.diagnosis.collapse import HitWindow, hit_window
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.quantities import LENGTH_KEY
from foreshock.diagnosis.rule import ThresholdRule
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
        false += sum(_is_healthy(episode.start, window) for episode in mine)
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


def scores_of(runs: Sequence[RecordedRun], rules: Sequence[str] | None = None) -> list[Score]:
    """Return the scores of all warning-level rules together, of those among them that lower the learning rate, and of
    each rule; None: of every rule that fired."""
    if rules is None:
        rules = sorted({episode.rule for run in runs for episode in run.episodes})
    return [score(rule, runs, alarms) for rule, alarms in _alarms_by_rule(runs, rules).items()]


def _alarms_by_rule(runs: Sequence[RecordedRun], rules: Iterable[str]) -> dict[str, list[list[Episode]]]:
    """Return the alarms in each run: of all warnings together, of those that lower the learning rate, of each rule."""
    together = {
        ALL_WARNINGS: [warnings_of(run) for run in runs],
        LOWERS_RATE: [lowering_of(run) for run in runs],
    }
    return together | {rule: [[each for each in run.episodes if each.rule == rule] for run in runs] for rule in rules}


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


def _is_healthy(step: int, window: HitWindow | None) -> bool:
    return window is None or step < window.first


SHIFTS = 20
BASELINE_STEPS = 50
TIMES_BASELINE = 3.0


def compared(runs: Sequence[RecordedRun], steps: Sequence[Sequence[ClosedStep]]) -> list[Score]:
    """Return the scores of the three baselines at the number of alarms of all warnings, of those that lower the
    learning rate, then of each rule.

    ``steps`` are those of each run.
    """
    rules = sorted({each.rule for run in runs for each in warnings_of(run)})
    alarms = _alarms_by_rule(runs, rules)
    return [each for rule, mine in alarms.items() for each in _at_equal_budget(rule, mine, runs, steps)]


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


STRICTNESS = (0.4, 0.6, 0.8, 1.0, 1.5, 2.5)
"""Distance of a threshold from what is normal, in units of the default's: below 1 a rule fires more easily."""


@dataclass(frozen=True, slots=True)
class RocPoint:
    """The score of a rule with its threshold at a strictness; 1.0 is the default."""

    strictness: float
    score: Score

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score.to_json()}


def roc_points(
    names: Sequence[str],
    steps: Sequence[Sequence[ClosedStep]],
    configuration: WarningConfiguration,
    floor: float | None = None,
) -> list[RocPoint]:
    """Return the points of every rule that fires at any strictness, and of all warning-level rules together."""
    replayed = {}
    for strictness in STRICTNESS:
        chosen = stricter(configuration, strictness)
        replayed[strictness] = [replay_run(name, each, chosen, floor) for name, each in zip(names, steps, strict=True)]
    rules = {each.rule for runs in replayed.values() for run in runs for each in run.episodes}
    points = [
        RocPoint(strictness, each) for strictness, runs in replayed.items() for each in scores_of(runs, sorted(rules))
    ]
    return sorted(points, key=lambda point: (point.score.rule, point.strictness))


def stricter(configuration: WarningConfiguration, factor: float) -> WarningConfiguration:
    """Return the configuration with every threshold ``factor`` times as far from what is normal.

    The distance of a relative threshold is the log of its multiple of the baseline, so 5× becomes 25× at factor 2; an
    absolute one moves by ten to the power of ``factor`` − 1. The log evidence of a surge and the standard deviations of
    a falling reward are ``factor`` times as large.
    """
    surge, reward = configuration.surge, configuration.reward
    return replace(
        configuration,
        surge=replace(surge, growth=surge.growth**factor, average_run_length=surge.average_run_length**factor),
        reward=replace(reward, fall=min(reward.fall * factor, 0.95), z=reward.z * factor),
        rules=tuple(_stricter_rule(rule, factor) for rule in configuration.rules),
    )


def _stricter_rule(rule: ThresholdRule, factor: float) -> ThresholdRule:
    absolute, relative = rule.absolute, rule.relative
    if absolute is not None and absolute > 0.0:
        away = math.log(10.0) * (factor - 1.0)
        absolute *= math.exp(-away if rule.direction == "below" else away)
    if relative is not None:
        relative = relative**factor
    return replace(rule, absolute=absolute, relative=relative)


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
    """The runs, the scores of the rules and of what they are compared with, and the ROC of every rule."""

    runs: tuple[RunResult, ...]
    rules: tuple[Score, ...]
    baselines: tuple[Score, ...]
    roc: tuple[RocPoint, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [each.to_json() for each in self.runs],
            "rules": [each.to_json() for each in self.rules],
            "baselines": [each.to_json() for each in self.baselines],
            "roc": [each.to_json() for each in self.roc],
        }


def backtest(
    names: Sequence[str],
    steps: Sequence[Sequence[ClosedStep]],
    configuration: WarningConfiguration,
    floor: float | None = None,
) -> BacktestResult:
    """Replay the runs, one sequence of steps for each name. ``floor``: the reward of a policy that learned nothing."""
    runs = [replay_run(name, each, configuration, floor) for name, each in zip(names, steps, strict=True)]
    lost = [lost_learning_rate(each, scales_under_apply(each, configuration)) for each in steps]
    return BacktestResult(
        tuple(RunResult(*each) for each in zip(runs, lost, strict=True)),
        tuple(scores_of(runs)),
        tuple(compared(runs, steps)),
        tuple(roc_points(names, steps, configuration, floor)),
    )
