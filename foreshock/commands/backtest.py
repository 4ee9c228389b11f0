"""`foreshock backtest`: replay recorded runs and print what each rule would have warned of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.commands.text import table

if TYPE_CHECKING:
    from foreshock.backtest.replay import RecordedRun
    from foreshock.backtest.scoring import Score

__all__ = ["command"]

GROWTHS = (1.5, 1.75, 2.0, 2.5, 3.0)
"""Thresholds of the ROC of the length surge, as multiples of the baseline."""

FALLS = (0.15, 0.25, 0.35, 0.5)
"""Thresholds of the ROC of the falling reward, as fractions of what was reached."""


class BacktestCommand:
    """`foreshock backtest FILE…`."""

    help = "replay recorded runs and show hits, misses, lead times and false alarms of every rule"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "files", nargs="+", type=Path, metavar="FILE",
            help="CSV, JSON lines, verl console log, TRL trainer_state.json, or an export of W&B or TensorBoard",
        )  # fmt: skip
        parser.add_argument("--model-kind", choices=("dense", "moe"), help="whose healthy ranges hold (default: dense)")
        parser.add_argument(
            "--reward-floor", type=float, metavar="REWARD",
            help="reward of a policy that learned nothing (default: 0, or -1 if some reward is negative)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the backtest. Raises UnreadableRun for a file that is no record of a run."""
        from foreshock.backtest.clocks import compared
        from foreshock.backtest.readers import read_run
        from foreshock.backtest.replay import replay_run
        from foreshock.backtest.scoring import score, scores_of
        from foreshock.early_warning.detectors import WarningConfiguration

        steps = [read_run(path) for path in arguments.files]
        configuration = WarningConfiguration.for_model(arguments.model_kind)

        def replayed(chosen: WarningConfiguration) -> list[RecordedRun]:
            pairs = zip(arguments.files, steps, strict=True)
            return [replay_run(str(path), each, chosen, arguments.reward_floor) for path, each in pairs]

        def point(label: str, rules: Sequence[str], chosen: WarningConfiguration) -> Score:
            runs = replayed(chosen)
            return score(label, runs, [[each for each in run.episodes if each.rule in rules] for run in runs])

        runs = replayed(configuration)
        scores, baselines = scores_of(runs), compared(runs, steps)
        surges = ("length_surge", "length_surge_early", "length_surge_again")
        roc = [
            point(f"length_surge, growth ×{growth:g}", surges,
                  replace(configuration, surge=replace(configuration.surge, growth=growth)))
            for growth in GROWTHS
        ] + [
            point(f"reward_fall, fall {fall:g}", ("reward_fall",),
                  replace(configuration, reward=replace(configuration.reward, fall=fall)))
            for fall in FALLS
        ]  # fmt: skip
        if arguments.json:
            print(json.dumps(_answer(runs, scores, baselines, roc), indent=2, ensure_ascii=False))
            return 0
        print("\n".join(_run_lines(runs)))
        for title, rows in (("rules", scores), ("baselines at an equal number of alarms", baselines), ("ROC", roc)):
            print(f"\n{title}")
            print("\n".join(_score_lines(rows)))
        return 0


def _answer(
    runs: Sequence[RecordedRun], scores: Sequence[Score], baselines: Sequence[Score], roc: Sequence[Score]
) -> dict[str, Any]:
    return {
        "runs": [
            {
                "name": run.name,
                "steps": len(run.steps),
                "collapse": run.collapse,
                "usable": run.usable,
                "episodes": [
                    {"rule": each.rule, "severity": each.severity, "start": each.start, "end": each.end}
                    for each in run.episodes
                ],
            }
            for run in runs
        ],
        "rules": [each.to_json() for each in scores],
        "baselines": [each.to_json() for each in baselines],
        "roc": [each.to_json() for each in roc],
    }


def _run_lines(runs: Sequence[RecordedRun]) -> list[str]:
    rows = []
    for run in runs:
        collapse = (
            "none" if run.collapse is None else f"{run.collapse}{'' if run.usable else ', no baseline: unusable'}"
        )
        alarms = ", ".join(f"{each.rule}@{each.start}" for each in run.episodes)
        rows.append([run.name, str(len(run.steps)), collapse, alarms or "none"])
    return table(["run", "steps", "collapse", "alarms"], rows, left=(0, 2, 3), indent="")


def _score_lines(scores: Sequence[Score]) -> list[str]:
    rows = []
    for each in scores:
        low, high = each.false_alarms_per_1000_interval
        first, last = each.hit_rate_interval
        lead = each.median_lead
        rows.append([
            each.rule,
            f"{each.hits}/{each.hits + each.misses}",
            f"{100 * first:.0f}-{100 * last:.0f} %" if each.hits + each.misses else "–",
            "–" if lead is None else f"{lead:g}",
            f"{each.false_alarms}/{each.armed_observations}",
            f"{each.false_alarms_per_1000:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{100 * each.healthy_share_in_alarm:.1f} %",
        ])  # fmt: skip
    header = ["rule", "hits", "95 %", "lead", "false/armed", "per 1,000", "95 %", "healthy time in alarm"]
    return table(header, rows, left=(0,), indent="")


command = BacktestCommand()
