"""The closed loop: `make bench-closed-loop`.

The table is that of the recorded runs of `examples/closed_loop`. One of them is made again from its seed, with a real
vLLM and real training, and compared with its record. Bar: ten seeds of every arm for at least one setting, and, on the
machine that made the record, equal values at every step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.closed_loop.__main__ import RESULTS, main
from examples.closed_loop.outcome import compare, complete_seeds, mismatch_seeds, outcomes, setting_names
from examples.closed_loop.plan import SEEDS, SETTINGS, Plan
from examples.collapses.results import Result, read_results

FEWEST_SEEDS = 10


def run() -> int:
    """Print the table, make one run again, and return the exit status."""
    results = read_results(RESULTS)
    found = outcomes(results, SEEDS)
    console = Console(width=120)
    most = 0
    for setting in setting_names():
        seeds = complete_seeds(found, setting)
        if len(seeds) < 2:
            console.print(f"{setting}: not run with every arm")
            continue
        most = max(most, len(seeds))
        of_mismatch = len(mismatch_seeds(found, setting, seeds))
        table = Table(title=f"{setting}: {len(seeds)} seeds, {of_mismatch} collapses of mismatch")
        for column in ("arm", "collapsed", "saved", "reward, last fifth", "minus constant (95 %)", "Σ η"):
            table.add_column(column, justify="left" if column == "arm" else "right")
        for each in compare(found, setting, seeds):
            low, high = each.difference_interval
            table.add_row(
                each.arm,
                f"{each.collapsed}/{each.runs}",
                f"{each.saved}/{each.runs}",
                f"{each.last_reward:.2f}",
                f"{each.difference:+.2f} ({low:+.2f} to {high:+.2f})",
                f"{each.learning_rate_share:.0%}",
            )
        console.print(table)
    plan = Plan(SETTINGS[0], "constant", complete_seeds(found, SETTINGS[0].name)[0])
    again = _made_again(plan)
    recorded = results[plan.name]
    difference = _largest_difference(recorded, again)
    same_machine = _machine(recorded) == _machine(again)
    equal = "nan" if not same_machine else str(int(difference == 0.0))
    console.print(
        f"{plan.name} made again {'on the same kind of machine' if same_machine else 'on another kind of machine'}: "
        f"largest difference of a mean reward {difference:.3g}"
    )
    print(f"seeds={most} settings={len(setting_names())} same_machine={int(same_machine)} equal={equal}")
    return 0 if most >= FEWEST_SEEDS and (not same_machine or difference == 0.0) else 1


def _made_again(plan: Plan) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        main(["--only", plan.name, "--results", folder])
        return read_results(Path(folder), only=plan.name)[plan.name]


def _machine(result: Result) -> tuple[str, str]:
    engine = result.made_by["engine"]
    return engine["device_name"], engine["cpu_isa"]


def _largest_difference(first: Result, second: Result) -> float:
    name = "rollout:reward_mean"
    if len(first.steps) != len(second.steps):
        return float("inf")
    return float(np.abs(first.columns[name] - second.columns[name]).max())


if __name__ == "__main__":
    sys.exit(run())
