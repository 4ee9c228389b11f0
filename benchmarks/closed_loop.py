"""The closed loop: `make bench-closed-loop`.

The tables are those of the recorded runs of `examples/closed_loop`; missing runs are listed. Recorded and generated
curves add three results: how much learning rate the loop takes from healthy runs, whether the remedy that the advice
favours is the better one, and the ROC of the warning "the driven part is beyond its set point". With `MAKE_AGAIN=1` one
run is made again from its seed, with a real vLLM and real training, and compared with its record.

Bars, each printed as 1, 0 or nan (not measured): collapses ≤ 1 of 12; reward ≥ 0.97 of the best arm; above cosine and
above sham in ≥ 3 settings; with masking better than either alone in ≥ 2; harm: reward ≥ 0.98 of constant at Σ η ≥ 0.95,
and ≤ 1 % of healthy curves and none of the benign logs lose more than 5 % of Σ η.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.diagnosis.curves import HELD_OUT_SEED, healthy_curves
from benchmarks.diagnosis.logs import real_curves
from examples.closed_loop.__main__ import RESULTS, main
from examples.closed_loop.analyse import LEAST_RATE, LEAST_REWARD
from examples.closed_loop.outcome import (
    ArmOutcome,
    Outcome,
    against,
    compare,
    compared_seeds,
    outcomes,
    paired_interval,
)
from examples.closed_loop.plan import FIRST_SEED, HARM, SEEDS, SETTINGS, Arm, Plan, Setting, plans
from examples.collapses.leads import episodes
from examples.collapses.results import RESULTS as COLLAPSES
from examples.collapses.results import Result, read_results
from examples.collapses.summary import Summary, closed_steps, summarize
from foreshock.backtest.replay import lost_learning_rate, replay_run, scales_under_apply
from foreshock.backtest.scoring import Score, score
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import LAST_STEP_KEY

CONFIGURATION = WarningConfiguration.for_model("dense")
FACTORS = (1.0, 2.0, 4.0, 6.0, 8.0, 16.0)
WARNING_FACTOR, IN_A_ROW = 16.0, 5
"""Constants of the warning: the driven part exceeds this multiple of its set point for this many steps in a row. Chosen
on the tuning part for the most hits at no more than one false alarm per 1,000."""
MOST_LOST = 0.05
NO_RIVALS: Sequence[Arm] = ("twin", "cosine", "advice", "advice-mis")
"""Arms that are not rivals of the advice's reward: they have no mismatch, a planned end, or the advice itself."""


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
        bars["equal"] = _equal(results)
    measured = {name: value for name, value in bars.items() if not math.isnan(value)}
    print(f"runs={len(found)} planned={len(plans())} " + " ".join(f"{name}={value:g}" for name, value in bars.items()))
    return 0 if all(measured[name] for name in measured if name not in FIGURES) else 1


FIGURES = ("hits", "collapses", "false_per_1000", "curves", "logs")
"""Printed values without a bar."""


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
        arms, is_full = _arms(found, setting)
        name = setting.dose.replace("-", "_")
        safe = any(arms[arm].collapsed <= 1 for arm in arms if arm not in ("twin", "advice"))
        bars[f"{name}_collapses"] = float(arms["advice"].collapsed <= 1 or not safe) if is_full else math.nan
        best = max((arms[arm].last_reward for arm in arms if arm not in NO_RIVALS), default=0.0)
        bars[f"{name}_reward"] = float(arms["advice"].last_reward >= 0.97 * best) if is_full else math.nan
    for rival in ("cosine", "sham"):
        bars[f"above_{rival}"] = _settings_above(found, [rival], "advice", 3)
    bars["with_masking"] = _settings_above(found, ["advice", "sequence-mis"], "advice-mis", 2)
    for setting in HARM:
        arms, is_full = _arms(found, setting)
        kept = bool(arms) and arms["advice"].last_reward >= LEAST_REWARD * arms["constant"].last_reward
        name = f"harm_{setting.dose.replace('-', '_')}"
        bars[name] = float(kept and arms["advice"].learning_rate_share >= LEAST_RATE) if is_full else math.nan
    return bars


def _arms(found: Sequence[Outcome], setting: Setting) -> tuple[dict[Arm, ArmOutcome], bool]:
    """Return the outcome of each arm, and whether all seeds are measured."""
    seeds = compared_seeds(found, setting.name)
    arms = {each.arm: each for each in compare(found, setting.name, seeds)} if seeds else {}
    return arms, len(seeds) >= SEEDS


def _settings_above(found: Sequence[Outcome], rivals: Sequence[Arm], arm: Arm, needed: int) -> float:
    differences = [[against(found, setting.name, rival, arm) for rival in rivals] for setting in SETTINGS]
    above = sum(all(len(each) > 1 and paired_interval(each)[0] > 0.0 for each in of) for of in differences)
    is_full = all(len(each) >= SEEDS for of in differences for each in of)
    return 1.0 if is_full and above >= needed else 0.0 if is_full else math.nan


def _recorded(console: Console) -> dict[str, float]:
    """Return the harm on healthy curves, and the early warning on the locked part of runs with a constant rate."""
    results = read_results(COLLAPSES)
    runs = summarize(results)
    healthy = [each for each in runs if each.collapse is None and each.learning_rate == 1e-4 and "lag" not in each.dose]
    logs = [each.steps for each in real_curves() if each.name.startswith("benign")]
    table = Table(title="Healthy curves: share of Σ η that the advice takes")
    for column in ("curves", "number", "largest loss", f"that lose more than {MOST_LOST:.0%}"):
        table.add_column(column, justify="left" if column == "curves" else "right")
    bars: dict[str, float] = {}
    for name, title, curves, share in (
        ("harm_recorded", "recorded, 1e-4, no lag", [closed_steps(results[each.name]) for each in healthy], 0.01),
        ("harm_curves", "generated: lengths, k3, lag", list(_with_mismatch()), 0.01),
        ("harm_planned", "the same, with a planned end", list(_with_mismatch(planned=True)), 0.01),
        ("harm_logs", "labelled benign logs", logs, 0.0),
    ):
        lost = [lost_learning_rate(steps, scales_under_apply(steps, CONFIGURATION)) for steps in curves]
        losing = sum(each > MOST_LOST for each in lost)
        table.add_row(title, str(len(lost)), f"{max(lost, default=math.nan):.1%}", str(losing))
        bars[name] = float(losing <= share * len(lost)) if lost else math.nan
    console.print(table)
    _early_warning(console, results, [each for each in runs if each.part == "tuning"], "tuning")
    found = _early_warning(console, results, [each for each in runs if each.part == "locked"], "locked")
    bars["early_warning"] = float(found.hits >= 0.9 * (found.hits + found.misses) and found.false_alarms_per_1000 <= 1)
    false = round(found.false_alarms_per_1000, 2)
    return bars | {"hits": found.hits, "collapses": found.hits + found.misses, "false_per_1000": false}


def _with_mismatch(*, planned: bool = False) -> Iterator[list[ClosedStep]]:
    """Yield the 600 healthy curves of lengths with a k3 of any healthy or static size, at lag 0, 1 to 8 or unknown.

    k3 has 25 % noise and drifts by a factor of up to three. For lagging tokens it is below the set point.
    """
    for seed, (_, steps) in enumerate(healthy_curves()):
        random = np.random.default_rng([HELD_OUT_SEED, seed, 1])
        lag = (0.0, float(random.integers(1, 9)), None)[seed % 3]
        level = float(np.exp(random.uniform(np.log(1e-5), np.log(1e-3 if lag else 3e-2))))
        drift = float(random.uniform(1.0, 3.0))
        found = []
        for place, step in enumerate(steps):
            k3 = level * drift ** (place / len(steps)) * math.exp(0.25 * random.normal())
            lags = {} if lag is None else {LAG_KEY: 0.0 if place == 0 else lag}
            plan = {LAST_STEP_KEY: float(steps[-1].step)} if planned else {}
            found.append(ClosedStep(step.step, {**step.values, K3: k3, **lags, **plan}))
        yield found


def _early_warning(console: Console, results: dict[str, Result], runs: Sequence[Summary], part: str) -> Score:
    """Print the ROC of the driven part as a warning of mismatch collapses; return its point at the chosen factor."""
    chosen = [each for each in runs if each.kind == "mismatch" or each.collapse is None]
    steps = [closed_steps(results[each.name]) for each in chosen]
    recorded = [replay_run(each.name, of, CONFIGURATION, 0.0) for each, of in zip(chosen, steps, strict=True)]
    beyond = [_beyond(each) for each in steps]
    table = Table(title=f"The driven part beyond its set point, times a factor, for {IN_A_ROW} steps: the {part} part")
    titles = ("factor", "hits", "median lead", "false per 1,000", "stands 3 steps before", "of the others, ever")
    for column in titles:
        table.add_column(column, justify="right")
    points = {}
    for factor in FACTORS:
        over = [_in_a_row(each, factor) for each in beyond]
        found = points[factor] = score("driven", recorded, [episodes("driven", each) for each in over])
        lead = "–" if found.median_lead is None else f"{found.median_lead:.0f}"
        rate = f"{found.false_alarms_per_1000:.1f}"
        standing, others = _standing(over, [each.collapse for each in recorded])
        table.add_row(f"{factor:g}", f"{found.hits}/{found.hits + found.misses}", lead, rate, standing, others)
    console.print(table)
    return points[WARNING_FACTOR]


def _standing(over: Sequence[Sequence[tuple[int, bool]]], collapses: Sequence[int | None]) -> tuple[str, str]:
    """Return how many collapses have the alarm three steps before them, and how many other runs ever have it."""
    pairs = list(zip(over, collapses, strict=True))
    before = [any(stands and step == end - 3 for step, stands in each) for each, end in pairs if end is not None]
    others = [any(stands for _, stands in each) for each, end in pairs if end is None]
    return f"{sum(before)}/{len(before)}", f"{sum(others)}/{len(others)}"


def _in_a_row(beyond: Sequence[tuple[int, float]], factor: float) -> list[tuple[int, bool]]:
    return [
        (step, place + 1 >= IN_A_ROW and min(value for _, value in beyond[place + 1 - IN_A_ROW : place + 1]) > factor)
        for place, (step, _) in enumerate(beyond)
    ]


def _beyond(steps: Sequence[ClosedStep]) -> list[tuple[int, float]]:
    """Return, for each step, the driven part divided by its set point; 0 if it is not measured."""
    state, found = WarningState(), []
    for each in steps:
        state, _ = advance(state, each, CONFIGURATION)
        found.append((each.step, (state.loop.driven or 0.0) / state.loop.set_point(CONFIGURATION.loop)))
    return found


def _equal(results: dict[str, Result]) -> float:
    """Make a run of the constant arm again: 1 if every reward is equal, NaN on another kind of machine."""
    plan = Plan(SETTINGS[0], "constant", FIRST_SEED)
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
