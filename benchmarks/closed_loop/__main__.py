"""The closed loop on the cheap test bed: `make bench-closed-loop`; SEEDS=30 for another number of seeds.

Prints the reward of the last fifth and the collapses of each arm in each setting, and the bars of the remedy: the loop
on the rate, and token TIS. Runs are kept in `build/`; the next call makes only those
that are missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Line, report
from benchmarks.closed_loop.arms import ARMS, REMEDY, SHADOW_ENDS, SHAM, WITHOUT_FORESIGHT, Arm
from benchmarks.closed_loop.harm import harm_lines
from benchmarks.closed_loop.outcomes import Key, Outcome, measure
from benchmarks.closed_loop.settings import SETTINGS
from examples.closed_loop.outcome import paired_interval

KEPT: Final = Path("build/closed_loop_bed.jsonl")
FIRST_SEED: Final = 80_000
"""Locked: no gain was chosen on these seeds. Tuning used 50000 and 50001."""
SEEDS: Final = 4
LEAST_REWARD: Final = 0.97
LEAST_OF_HARM: Final = 0.98
LEAST_RATE: Final = 0.95
MOST_COLLAPSES: Final = 1 / 12


class Runs:
    """The outcomes of the locked seeds."""

    def __init__(self, found: Mapping[Key, Outcome], seeds: Sequence[int]) -> None:
        self._found, self._seeds = found, seeds

    def of(self, setting: str, arm: Arm) -> list[Outcome]:
        return [found for seed in self._seeds if (found := self._found.get((setting, arm.name, seed))) is not None]

    def reward(self, setting: str, arm: Arm) -> float:
        return float(np.mean([each.last_reward for each in self.of(setting, arm)]))

    def lost(self, setting: str, arm: Arm) -> int:
        return sum(each.is_lost for each in self.of(setting, arm))

    def collapses(self, setting: str, arm: Arm) -> int:
        return sum(each.collapse is not None for each in self.of(setting, arm))

    def collapses_before(self, setting: str, arm: Arm, step: int) -> bool:
        """Return whether a run of the arm collapses before a step."""
        return any(each.collapse is not None and each.collapse < step for each in self.of(setting, arm))

    def rate(self, setting: str, arm: Arm) -> float:
        return float(np.mean([each.learning_rate_share for each in self.of(setting, arm)]))

    def against_best(self, setting: str, arm: Arm) -> float:
        """Return the reward as a fraction of that of the best arm without foresight."""
        return self.reward(setting, arm) / max(1e-3, *(self.reward(setting, each) for each in WITHOUT_FORESIGHT))

    def settings_above(self, arm: Arm, rival: Arm) -> int:
        """Return the number of settings in which the interval of the difference is above 0."""
        above = 0
        for setting in SETTINGS:
            mine, theirs = (
                {each.seed: each.last_reward for each in self.of(setting.name, which)} for which in (arm, rival)
            )
            above += paired_interval([mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()])[0] > 0.0
        return above


def main() -> int:
    torch.set_num_threads(1)
    number = int(os.environ.get("SEEDS", str(SEEDS)))
    if number < 2 or number % 2:
        print(f"SEEDS must be an even number of at least 2, got {number}", file=sys.stderr)
        return 2
    seeds = range(FIRST_SEED, FIRST_SEED + number)
    return show(Runs(measure(KEPT, SETTINGS, seeds), seeds), number)


def show(runs: Runs, seeds: int) -> int:
    """Print the tables and the bars, and return the exit status."""
    console = Console(width=170)
    names = [each.name for each in SETTINGS]
    for shown in (names[: len(names) // 2], names[len(names) // 2 :]):
        table = Table(title="Reward of the last fifth; collapses / runs that end below their start, of all; mean scale")
        for column in ("arm", *shown):
            table.add_column(column, justify="left" if column == "arm" else "right")
        for arm in (*ARMS, SHAM):
            cells = [
                f"{runs.reward(name, arm):.3f} {runs.collapses(name, arm)}/{runs.lost(name, arm)}"
                f"/{len(runs.of(name, arm))} {runs.rate(name, arm):.0%}"
                for name in shown
            ]
            table.add_row(arm.name, *cells)
        console.print(table)
    return report([*_bars(runs), *harm_lines()], seeds=seeds, settings=len(SETTINGS))


def _bars(runs: Runs) -> list[Line]:
    driven = [each.name for each in SETTINGS if not each.is_harm]
    harm = [each.name for each in SETTINGS if each.is_harm]
    by_name = {arm.name: arm for arm in ARMS}
    constant, cosine_mis = by_name["constant"], by_name["cosine-mis"]
    # Where the constant arm has collapsed before, nothing is left to apply the advice to.
    late = [name for name in driven if not runs.collapses_before(name, constant, SHADOW_ENDS)]
    lines = []
    for key, arm, names in (
        ("", REMEDY, driven), ("no_lags_", by_name["remedy-no-lags"], driven),
        ("blind_", by_name["remedy-blind"], driven), ("from_40_", by_name["remedy-40"], late),
    ):  # fmt: skip
        text = f"{arm.name}: "
        counts = [(runs.collapses(name, arm), runs.lost(name, arm), len(runs.of(name, arm))) for name in names]
        lines += [
            Line(f"{key}least_reward", f"{text}least reward against the best arm without foresight",
                 min(runs.against_best(name, arm) for name in names), LEAST_REWARD, at_least=True),
            Line(f"{key}collapsed", f"{text}largest fraction of collapsed seeds in a setting",
                 max(collapsed / of for collapsed, _, of in counts), MOST_COLLAPSES),
            Line(f"{key}lost", f"{text}largest fraction that ends below its start",
                 max(lost / of for _, lost, of in counts), MOST_COLLAPSES),
            Line(f"{key}harm_reward", f"{text}least reward against constant where that learns well",
                 min(runs.reward(name, arm) / runs.reward(name, constant) for name in harm), LEAST_OF_HARM,
                 at_least=True),
            Line(f"{key}harm_rate", f"{text}least Σ η there", min(runs.rate(name, arm) for name in harm), LEAST_RATE,
                 at_least=True),
        ]  # fmt: skip
    # An arm may end without any reward.
    least = min(runs.reward(name, REMEDY) / max(runs.reward(name, cosine_mis), 1e-3) for name in driven)
    lines += [
        Line(
            "above_cosine_mis", "settings above cosine-mis", runs.settings_above(REMEDY, cosine_mis), 3, at_least=True
        ),
        Line("against_cosine_mis", "least reward against cosine-mis", least, LEAST_REWARD, at_least=True),
        Line("above_sham", "settings above the sham", runs.settings_above(REMEDY, SHAM)),
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
