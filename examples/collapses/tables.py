"""The tables of docs/collapses.md: dose and response, kinds of collapses, leads of signals, Foreshock's rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from examples.collapses.grid import DOSES, LEARNING_RATES
from examples.collapses.leads import RATIOS, SIGNALS, Signal, chosen_ratio, false_rate, roc
from examples.collapses.pairs import PAIRED, best_alarm, scores_of
from examples.collapses.summary import Summary
from foreshock.backtest.replay import RecordedRun
from foreshock.backtest.scoring import Score
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.statistics import proportion_interval

RATES: Final = tuple(sorted(LEARNING_RATES))
NOTHING: Final = "–"

K3_EDGES: Final = (0.0, 1e-12, 1e-3, 1e-2, 3e-2, 1e-1, math.inf)
"""Bins of k3, nats per token. Doses fall into them in groups; they were chosen on the tuning part."""

Part = Sequence[tuple[Summary, RecordedRun, Sequence[ClosedStep]]]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are aligned left."""
    header = list(header)
    rule = ["---" if place < left else "---:" for place in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *(list(row) for row in rows)))


def share(hits: int, trials: int) -> str:
    """Return a share with its exact 95 % interval."""
    if trials == 0:
        return NOTHING
    low, high = proportion_interval(hits, trials)
    return f"{hits}/{trials} ({100 * low:.0f}–{100 * high:.0f} %)"


def dose_response(runs: Sequence[Summary]) -> str:
    """Return collapses and k3 for each dose."""
    rows = []
    for dose in DOSES:
        mine = [run for run in runs if run.dose == dose.name]
        if not mine:
            rows.append([f"`{dose.name}`", dose.meaning, *[NOTHING] * 6])
            continue
        collapsed = [run.collapse for run in mine if run.collapse is not None]
        rows.append([
            f"`{dose.name}`",
            dose.meaning,
            _range(run.k3 for run in mine),
            _range(run.fixed_k3 for run in mine),
            share(len(collapsed), len(mine)),
            _steps(collapsed),
            str(sum(run.kind == "mismatch" for run in mine)),
            f"{np.median([run.best_reward for run in mine]):.2f}",
        ])  # fmt: skip
    header = (
        "dose", "sampler", "k3, nats", "k3, frozen float32", "collapsed (95 %)", "at step", "of mismatch", "best reward"
    )  # fmt: skip
    return markdown(header, rows, left=2)


def paired(runs: Sequence[Summary]) -> str:
    """Return how the runs of each dose and their twins without mismatch ended."""
    twins = {(run.learning_rate, run.seed): run.collapse is not None for run in runs if run.dose == DOSES[0].name}
    rows = []
    for dose in DOSES[1:]:
        mine = [run for run in runs if run.dose == dose.name and (run.learning_rate, run.seed) in twins]
        ends = Counter((run.collapse is not None, twins[run.learning_rate, run.seed]) for run in mine)
        only, reverse = ends[True, False], ends[False, True]
        rows.append([
            f"`{dose.name}`", str(len(mine)), str(ends[True, True]), str(only), str(reverse), str(ends[False, False]),
            share(only, only + reverse),
        ])  # fmt: skip
    header = ("dose", "pairs", "both", "only the dose", "only the twin", "neither", "dose, of pairs that differ (95 %)")
    return markdown(header, rows)


def by_learning_rate(runs: Sequence[Summary]) -> str:
    """Return the collapses of each cell of the grid."""
    rows = []
    for dose in DOSES:
        cells = [[run for run in runs if run.dose == dose.name and run.learning_rate == rate] for rate in RATES]
        rows.append([f"`{dose.name}`", *(_cell(cell) for cell in cells)])
    totals = [[run for run in runs if run.learning_rate == rate] for rate in RATES]
    rows.append([
        "all doses", *(share(sum(run.collapse is not None for run in total), len(total)) for total in totals)
    ])  # fmt: skip
    return markdown(("dose", *(f"η = {rate:g}" for rate in RATES)), rows)


def by_k3(runs: Sequence[Summary]) -> str:
    """Return the share of collapses by k3, for each learning rate."""
    rows = []
    for low, high in pairwise(K3_EDGES):
        mine = [run for run in runs if low <= run.k3 < high]
        cells = [[run for run in mine if run.learning_rate == rate] for rate in RATES]
        collapsed = [run.collapse for run in mine if run.collapse is not None]
        rows.append([
            "0" if high == K3_EDGES[1] else f"{low:g} – {high:g}" if low >= K3_EDGES[2] else f"below {high:g}",
            *(f"{sum(run.collapse is not None for run in cell)}/{len(cell)}" if cell else NOTHING for cell in cells),
            share(len(collapsed), len(mine)),
            _steps(collapsed),
        ])  # fmt: skip
    return markdown(("k3, nats", *(f"η = {rate:g}" for rate in RATES), "all (95 %)", "at step"), rows)


def kinds(runs: Sequence[Summary]) -> str:
    """Return the counts of collapses by kind, of the tuning and of the locked part."""
    rows = []
    for part in ("tuning", "locked"):
        mine = [run for run in runs if run.part == part]
        collapsed = [run for run in mine if run.collapse is not None]
        counts = [sum(run.kind == kind for run in collapsed) for kind in ("mismatch", "learning rate", "unknown")]
        usable = sum(run.usable for run in collapsed)
        rows.append([part, str(len(mine)), str(len(collapsed)), *map(str, counts), str(usable)])
    header = ("part", "runs", "collapsed", "of mismatch", "of the learning rate", "twin not done", "usable for leads")
    return markdown(header, rows)


def rocs(part: Part) -> dict[Signal, dict[float, Score]]:
    """Return the score of a simple alarm on each signal at every ratio."""
    runs, steps = [each[1] for each in part], [each[2] for each in part]
    return {signal: roc(signal, runs, steps) for signal in SIGNALS}


def leads(tuning: dict[Signal, dict[float, Score]], locked: dict[Signal, dict[float, Score]]) -> str:
    """Return what a simple alarm on each signal gives: its threshold from the tuning part, its score on both."""
    rows = []
    for signal in SIGNALS:
        of_tuning, of_locked = tuning[signal], locked[signal]
        ratio = chosen_ratio(of_tuning)
        if ratio is None:
            rows.append([signal.title, NOTHING, *[NOTHING] * 6])
            continue
        rows.append([signal.title, f"{ratio:g}", *_score(of_tuning[ratio]), *_score(of_locked[ratio])])
    header = ("signal", "θ", "tuning: hits (95 %)", "lead", "false", "locked: hits (95 %)", "lead", "false")
    return markdown(header, rows)


def signal_rocs(scores: dict[Signal, dict[float, Score]]) -> str:
    """Return hits and false alarms of each signal at every ratio."""
    rows = [
        [
            signal.title,
            *(f"{_percent(each.hits, each.hits + each.misses)}, {false_rate(each):.1f}" for each in at.values()),
        ]
        for signal, at in scores.items()
    ]
    return markdown(("signal", *(f"θ = {ratio:g}" for ratio in RATIOS)), rows)


def pairs(tuning: Part, locked: Part, most_false: float) -> str:
    """Return what a signal gives together with a falling reward, at thresholds from the tuning part."""
    rows = []
    for signal in PAIRED:
        alarm, of_tuning = best_alarm(signal, [each[1] for each in tuning], [each[2] for each in tuning], most_false)
        ((_, of_locked),) = scores_of([alarm], [each[1] for each in locked], [each[2] for each in locked])
        drop = f"{alarm.drop:.0%}" if alarm.drop else NOTHING
        rows.append([signal.title, f"{alarm.ratio:g}", drop, *_score(of_tuning), *_score(of_locked)])
    header = (
        "signal", "θ", "reward below its best", "tuning: hits (95 %)", "lead", "false",
        "locked: hits (95 %)", "lead", "false",
    )  # fmt: skip
    return markdown(header, rows)


def rules(scores: Sequence[Score]) -> str:
    """Return the scores of Foreshock's own rules."""
    return markdown(
        ("rule", "hits (95 %)", "lead", "false per 1,000 armed (95 %)", "healthy time in alarm"),
        (
            [
                f"`{each.rule}`" if "_" in each.rule else each.rule,
                share(each.hits, each.hits + each.misses),
                _lead(each),
                "{:.1f} ({:.1f}–{:.1f})".format(each.false_alarms_per_1000, *each.false_alarms_per_1000_interval),
                f"{100 * each.healthy_share_in_alarm:.0f} %",
            ]
            for each in scores
        ),
    )


def calibration(tuning: Sequence[Summary], locked: Sequence[Summary]) -> str:
    """Return predicted and observed shares: a cell's share on the tuning part, and the locked runs of these cells."""

    def cell(run: Summary) -> tuple[float, int]:
        return run.learning_rate, next(place for place, edge in enumerate(K3_EDGES[1:]) if run.k3 < edge)

    predicted: dict[str, float] = {}
    for run in locked:
        alike = [other.collapse is not None for other in tuning if cell(other) == cell(run)]
        if alike:
            predicted[run.name] = sum(alike) / len(alike)
    rows = []
    for name, holds in _BANDS:
        mine = [run for run in locked if run.name in predicted and holds(predicted[run.name])]
        mean = f"{np.mean([predicted[run.name] for run in mine]):.2f}" if mine else NOTHING
        rows.append([name, mean, share(sum(run.collapse is not None for run in mine), len(mine))])
    return markdown(("predicted share", "mean predicted", "collapsed of the locked (95 %)"), rows)


_BANDS: Final[tuple[tuple[str, Callable[[float], bool]], ...]] = (
    ("0", lambda value: value == 0.0),
    ("above 0, below 0.5", lambda value: 0.0 < value < 0.5),
    ("0.5 or more, below 1", lambda value: 0.5 <= value < 1.0),
    ("1", lambda value: value == 1.0),
)


def _score(each: Score) -> list[str]:
    false = f"{false_rate(each):.1f}" if each.healthy_observations else NOTHING
    return [share(each.hits, each.hits + each.misses), _lead(each), false]


def _lead(each: Score) -> str:
    if not each.leads:
        return NOTHING
    return f"{each.median_lead:g} ({min(each.leads)}–{max(each.leads)})"


def _percent(hits: int, trials: int) -> str:
    return f"{100 * hits / trials:.0f} %" if trials else NOTHING


def _cell(runs: Sequence[Summary]) -> str:
    if not runs:
        return NOTHING
    steps = sorted(run.collapse for run in runs if run.collapse is not None)
    return f"{len(steps)}/{len(runs)}" + (f": {', '.join(map(str, steps))}" if steps else "")


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return NOTHING
    return f"{np.median(steps):g} ({min(steps)}–{max(steps)})" if len(steps) > 1 else str(steps[0])


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    if found[-1] == 0.0:
        return "0"
    return f"{np.median(found):.1e} ({found[0]:.0e}–{found[-1]:.0e})"
