"""The closed loop: `make bench-closed-loop`.

The tables are those of the recorded runs of `examples/closed_loop`; what is not run yet is named. Beside them, from
recorded curves: what the loop takes from healthy runs, and the ROC of "the driven part or the update is beyond its set
point" as a warning on the locked part of the benchmark of collapses. `MAKE_AGAIN=1`: one run is made again from its
seed, with a real vLLM and real training, and compared with its record.

Bars, each printed as 1, 0 or nan (not measured): collapses ≤ 1 of 12; reward ≥ 0.97 of the best arm; above cosine and
above sham in ≥ 3 settings; with masking better than either alone in ≥ 2; harm: reward ≥ 0.98 of constant at Σ η ≥ 0.95.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.closed_loop.__main__ import RESULTS, main
from examples.closed_loop.outcome import (
    Outcome,
    against,
    compare,
    compared_seeds,
    outcomes,
    paired_interval,
)
from examples.closed_loop.plan import HARM, SEEDS, SETTINGS, Arm, Plan, Setting, plans
from examples.collapses.leads import episodes
from examples.collapses.results import RESULTS as COLLAPSES
from examples.collapses.results import Result, read_results
from examples.collapses.summary import Summary, closed_steps, summarize
from foreshock.backtest.replay import lost_learning_rate, replay_run, scales_under_apply
from foreshock.backtest.scoring import score
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance

CONFIGURATION = WarningConfiguration.for_model("dense")
FACTORS = (1.0, 2.0, 4.0, 8.0)
MOST_LOST = 0.05


def run() -> int:
    """Print the tables and the bars, and return the exit status."""
    results = read_results(RESULTS)
    found = outcomes(results, SEEDS)
    console = Console(width=120)
    for setting in (*SETTINGS, *HARM):
        _print_setting(console, found, setting)
    bars = _bars(found)
    bars |= _recorded(console)
    if os.environ.get("MAKE_AGAIN"):
        bars["equal"] = _equal(results, found)
    measured = {name: value for name, value in bars.items() if not math.isnan(value)}
    print(f"runs={len(found)} planned={len(plans())} " + " ".join(f"{name}={value:g}" for name, value in bars.items()))
    return 0 if all(measured[name] for name in measured if name not in FIGURES) else 1


FIGURES = ("hits", "collapses", "false_per_1000", "curves")
"""Printed values that are no bar."""


def _print_setting(console: Console, found: Sequence[Outcome], setting: Setting) -> None:
    seeds = compared_seeds(found, setting.name)
    if len(seeds) < 2:
        console.print(f"{setting.name}: not measured yet ({len(seeds)} seeds with the advice)")
        return
    table = Table(title=f"{setting.name}: {len(seeds)} seeds; arms that have all of them")
    for column in ("arm", "collapsed", "reward, last fifth", "minus constant (95 %)", "Σ η"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for each in compare(found, setting.name, seeds):
        low, high = each.difference_interval
        table.add_row(
            each.arm, f"{each.collapsed}/{each.runs}", f"{each.last_reward:.3f}",
            f"{each.difference:+.3f} ({low:+.3f} to {high:+.3f})", f"{each.learning_rate_share:.0%}",
        )  # fmt: skip
    console.print(table)


def _bars(found: Sequence[Outcome]) -> dict[str, float]:
    """Return each bar: 1 reached, 0 not, NaN not measured with all seeds in all settings."""
    bars = {}
    for setting in SETTINGS:
        seeds = compared_seeds(found, setting.name)
        arms = {each.arm: each for each in compare(found, setting.name, seeds)} if seeds else {}
        name = setting.dose.replace("-", "_")
        safe = bool(arms) and any(arms[arm].collapsed <= 1 for arm in arms if arm not in ("twin", "advice"))
        is_full = len(seeds) >= SEEDS
        bars[f"{name}_collapses"] = float(arms["advice"].collapsed <= 1 or not safe) if is_full else math.nan
        best = max((arms[arm].last_reward for arm in arms if arm not in ("twin", "cosine", "advice")), default=0.0)
        bars[f"{name}_reward"] = float(arms["advice"].last_reward >= 0.97 * best) if is_full else math.nan
    for rival in ("cosine", "sham"):
        bars[f"above_{rival}"] = _settings_above(found, [rival], "advice", 3)
    bars["with_masking"] = _settings_above(found, ["advice", "sequence-mis"], "advice-mis", 2)
    for setting in HARM:
        seeds = compared_seeds(found, setting.name)
        arms = {each.arm: each for each in compare(found, setting.name, seeds)} if seeds else {}
        kept = bool(arms) and arms["advice"].last_reward >= 0.98 * arms["constant"].last_reward
        name = f"harm_{setting.dose.replace('-', '_')}"
        bars[name] = float(kept and arms["advice"].learning_rate_share >= 0.95) if len(seeds) >= SEEDS else math.nan
    return bars


def _settings_above(found: Sequence[Outcome], rivals: Sequence[Arm], arm: Arm, needed: int) -> float:
    differences = [[against(found, setting.name, rival, arm) for rival in rivals] for setting in SETTINGS]
    above = sum(all(len(each) > 1 and paired_interval(each)[0] > 0.0 for each in of) for of in differences)
    is_full = all(len(each) >= SEEDS for of in differences for each in of)
    return 1.0 if is_full and above >= needed else 0.0 if is_full else math.nan


def _recorded(console: Console) -> dict[str, float]:
    """Return the harm on recorded healthy runs and the early warning on the locked part; a constant rate in all."""
    results = read_results(COLLAPSES)
    runs = summarize(results)
    healthy = [each for each in runs if each.collapse is None and each.learning_rate == 1e-4 and "lag" not in each.dose]
    lost = []
    for each in healthy:
        steps = closed_steps(results[each.name])
        lost.append(lost_learning_rate(steps, scales_under_apply(steps, CONFIGURATION)))
    table = Table(title="Recorded healthy runs at 1e-4 without lag: share of Σ η that the advice takes")
    for column in ("runs", "largest loss", f"runs that lose more than {MOST_LOST:.0%}"):
        table.add_column(column, justify="right")
    losing = sum(each > MOST_LOST for each in lost)
    table.add_row(str(len(lost)), f"{max(lost):.1%}", str(losing))
    console.print(table)
    hits, collapses, false = _early_warning(console, results, [each for each in runs if each.part == "locked"])
    return {
        "harm_recorded": float(losing <= 0.01 * len(lost)),
        "curves": len(lost),
        "early_warning": float(hits >= 0.9 * collapses and false <= 1.0),
        "hits": hits,
        "collapses": collapses,
        "false_per_1000": round(false, 2),
    }


def _early_warning(console: Console, results: dict[str, Result], runs: Sequence[Summary]) -> tuple[int, int, float]:
    """Print the ROC of the loop's error as a warning of mismatch collapses; return its point at the set points."""
    chosen = [each for each in runs if each.kind == "mismatch" or each.collapse is None]
    steps = [closed_steps(results[each.name]) for each in chosen]
    recorded = [replay_run(each.name, of, CONFIGURATION, 0.0) for each, of in zip(chosen, steps, strict=True)]
    errors = [_errors(each) for each in steps]
    table = Table(title="The driven part beyond its set point, times a factor, as a warning (locked part)")
    for column in (
        "factor",
        "hits",
        "median lead",
        "false per 1,000",
        "over 3 steps before",
        "of the other runs, ever over",
    ):
        table.add_column(column, justify="right")
    point = (0, 0, math.nan)
    for factor in FACTORS:
        over = [[(step, error > math.log(factor)) for step, error in each] for each in errors]
        found = score("driven", recorded, [episodes("driven", each) for each in over])
        lead = "–" if found.median_lead is None else f"{found.median_lead:.0f}"
        rate = f"{found.false_alarms_per_1000:.1f}"
        standing, others = _standing(over, [each.collapse for each in recorded])
        table.add_row(f"{factor:g}", f"{found.hits}/{found.hits + found.misses}", lead, rate, standing, others)
        if factor == 1.0:
            point = found.hits, found.hits + found.misses, found.false_alarms_per_1000
    console.print(table)
    return point


def _standing(over: Sequence[Sequence[tuple[int, bool]]], collapses: Sequence[int | None]) -> tuple[str, str]:
    """Return of how many collapses the alarm stands three steps before, and in how many other runs it ever stands."""
    pairs = list(zip(over, collapses, strict=True))
    before = [any(stands and step == end - 3 for step, stands in each) for each, end in pairs if end is not None]
    others = [any(stands for _, stands in each) for each, end in pairs if end is None]
    return f"{sum(before)}/{len(before)}", f"{sum(others)}/{len(others)}"


def _errors(steps: Sequence[ClosedStep]) -> list[tuple[int, float]]:
    state, found = WarningState(), []
    for each in steps:
        state, _ = advance(state, each, CONFIGURATION)
        found.append((each.step, state.loop.error))
    return found


def _equal(results: dict[str, Result], found: Sequence[Outcome]) -> float:
    """Make a run of the constant arm again: 1 if every reward is equal, NaN on another kind of machine."""
    plan = Plan(SETTINGS[0], "constant", compared_seeds(found, SETTINGS[0].name)[0])
    with tempfile.TemporaryDirectory() as folder:
        main(["--only", plan.name, "--results", folder])
        again = read_results(Path(folder), only=plan.name)[plan.name]
    recorded, name = results[plan.name], "rollout:reward_mean"
    if _machine(recorded) != _machine(again):
        return math.nan
    return float(np.array_equal(recorded.columns[name], again.columns[name]))


def _machine(result: Result) -> tuple[str, str]:
    engine = result.made_by["engine"]
    return engine["device_name"], engine["cpu_isa"]


if __name__ == "__main__":
    sys.exit(run())
