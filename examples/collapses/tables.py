"""The tables of docs/collapses.md: dose and response, leads of signals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from examples.collapses.grid import DOSES
from examples.collapses.leads import SIGNALS, chosen_ratio, false_rate, roc
from examples.collapses.summary import Summary
from foreshock.backtest.replay import RecordedRun
from foreshock.backtest.scoring import Score
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.statistics import proportion_interval

NOTHING: Final = "–"

Part = Sequence[tuple[Summary, RecordedRun, Sequence[ClosedStep]]]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table whose first column is aligned left."""
    header = list(header)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *(list(row) for row in rows)))


def share(hits: int, trials: int) -> str:
    """Return a share with its exact 95 % interval."""
    if trials == 0:
        return NOTHING
    low, high = proportion_interval(hits, trials)
    return f"{hits}/{trials} ({100 * low:.0f}–{100 * high:.0f} %)"


def dose_response(runs: Sequence[Summary]) -> str:
    """Return collapses and k3 for each dose, and how its runs and their twins without mismatch ended."""
    twins = {(run.learning_rate, run.seed): run.collapse is not None for run in runs if run.dose == DOSES[0].name}
    rows = []
    for dose in DOSES:
        mine = [run for run in runs if run.dose == dose.name]
        if not mine:
            rows.append([f"`{dose.name}`", *[NOTHING] * 5])
            continue
        ends = Counter(
            (run.collapse is not None, twins[run.learning_rate, run.seed])
            for run in mine
            if (run.learning_rate, run.seed) in twins
        )
        collapsed = [run.collapse for run in mine if run.collapse is not None]
        rows.append([
            f"`{dose.name}`",
            _range(run.k3 for run in mine),
            share(len(collapsed), len(mine)),
            _steps(collapsed),
            NOTHING if dose == DOSES[0] else f"{ends[True, False]}, {ends[False, True]}",
            f"{np.median([run.best_reward for run in mine]):.2f}",
        ])  # fmt: skip
    header = ("dose", "k3, nats", "collapsed (95 %)", "at step", "only it, only its twin", "best reward")
    return markdown(header, rows)


def leads(tuning: Part, locked: Part) -> str:
    """Return what a simple alarm on each signal gives: its threshold from the tuning part, its score on the locked."""
    rows, without = [], []
    for signal in SIGNALS:
        ratio = chosen_ratio(roc(signal, *_runs_and_steps(tuning)))
        if ratio is None:
            rows.append([signal.title, *[NOTHING] * 4])
            continue
        found = roc(signal, *_runs_and_steps(locked))[ratio]
        if found.misses and not found.hits:
            without.append(signal.title)
            continue
        false = f"{false_rate(found):.1f}" if found.healthy_observations else NOTHING
        rows.append([signal.title, f"{ratio:g}", share(found.hits, found.hits + found.misses), _lead(found), false])
    table = markdown(("signal", "θ", "hits (95 %)", "lead", "false per 1,000"), rows)
    return f"{table}\n\nWithout a hit: {', '.join(without)}." if without else table


def _runs_and_steps(part: Part) -> tuple[list[RecordedRun], list[Sequence[ClosedStep]]]:
    return [each[1] for each in part], [each[2] for each in part]


def _lead(each: Score) -> str:
    if not each.leads:
        return NOTHING
    return f"{each.median_lead:g} ({min(each.leads)}–{max(each.leads)})"


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return NOTHING
    return f"{np.median(steps):g} ({min(steps)}–{max(steps)})" if len(steps) > 1 else str(steps[0])


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    if found[-1] == 0.0:
        return "0"
    return f"{np.median(found):.1e} ({found[0]:.0e}–{found[-1]:.0e})"
