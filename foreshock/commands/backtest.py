"""`foreshock backtest`: replay recorded runs and print what each rule would have warned of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from foreshock.commands.command import Command
from foreshock.commands.option_types import FINITE
from foreshock.commands.text import Progress, table

if TYPE_CHECKING:
    from foreshock.backtest.scoring import BacktestResult, RunResult, Score


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="CSV or JSON lines of metrics, a console log of verl or slime, verl's file logger, TRL's "
        "trainer_state.json, an export of W&B, TensorBoard event files or a folder of them",
    )  # fmt: skip
    parser.add_argument("--model-kind", choices=("dense", "moe"), help="whose healthy ranges hold (default: dense)")
    parser.add_argument(
        "--reward-floor", type=FINITE, metavar="REWARD",
        help="reward of a policy that learned nothing (default: 0 if no reward is below -0.1, else -1 if none is "
        "below -1, else the lowest reward)",
    )  # fmt: skip
    parser.add_argument("--rules", type=Path, metavar="FILE", help="the file of FORESHOCK_RULES (default: none)")
    parser.add_argument("--full", action="store_true", help="also print every rule")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the backtest.

    Raises UnreadableRun for a file that is no record of a run, and InvalidRules for an invalid file of rules.
    """
    from foreshock.backtest.readers import read_record
    from foreshock.backtest.scoring import backtest
    from foreshock.diagnosis.detectors import WarningConfiguration
    from foreshock.diagnosis.rule_files import NO_CHANGES, read_rules
    from foreshock.diagnosis.wording import names_read

    changes = NO_CHANGES if arguments.rules is None else read_rules(arguments.rules)
    progress, records = Progress("reading runs", len(arguments.files)), []
    for path in arguments.files:
        records.append(read_record(path))
        progress.show(len(records))
    steps = [record.steps for record in records]
    configuration = WarningConfiguration.for_model(arguments.model_kind, changes)
    result = backtest([str(path) for path in arguments.files], steps, configuration, arguments.reward_floor)
    if arguments.json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(result, full=arguments.full)), "\n")
        for path, record in zip(arguments.files, records, strict=True):
            print("\n".join(names_read(str(path), record.read, record.unread)))
    return 0


def _lines(result: BacktestResult, *, full: bool) -> list[str]:
    lines = [*_answer(result), ""]
    lines += table(_RUN_HEADER, [_run_cells(each) for each in result.runs], left=(0, 2, 4), indent="")
    if not full:
        return [*lines, "", "Every rule: --full"]
    return [*lines, "", "rules", *table(_SCORE_HEADER, [_score_cells(each) for each in result.rules], indent="")]


_RUN_HEADER = ("run", "steps", "collapse", "Σ η lost under apply", "alarms")
_SCORE_HEADER = (
    "rule", "hits", "95 %", "lead", "false/armed", "per 1,000", "95 %", "healthy time in alarm", "95 % over runs",
)  # fmt: skip


def _answer(result: BacktestResult) -> list[str]:
    """Return what the warnings are worth on these runs: collapses found, false alarms, and the learning rate lost."""
    from foreshock.backtest.scoring import ALL_WARNINGS

    found = next(each for each in result.rules if each.rule == ALL_WARNINGS)
    usable, healthy = found.hits + found.misses, [each for each in result.runs if each.run.collapse is None]
    lead = "" if found.median_lead is None else f", {found.median_lead:g} steps before in the median"
    unusable = sum(each.run.collapse is not None for each in result.runs) - usable
    left_out = f" ({unusable} more came too early to be judged)" if unusable else ""
    low, high = found.false_alarms_per_1000_interval
    rate = f"{found.false_alarms_per_1000:.2g} per 1,000 (95 %: {low:.2g} to {high:.2g})"
    taken = max((each.lost for each in healthy), default=0.0)
    return [
        f"{found.hits} of {usable} collapses warned of{lead}{left_out}."
        if usable
        else f"No collapse that could be warned of{left_out}.",
        f"{found.false_alarms} false alarms in {found.armed_observations:,} watched steps: {rate}.",
        f"Under apply, a run without a collapse would have lost at most {100 * taken:.1f} % of Σ η.",
    ]


def _run_cells(result: RunResult) -> list[str]:
    run = result.run
    collapse = "none" if run.collapse is None else f"{run.collapse}{'' if run.usable else ', no baseline: unusable'}"
    alarms = ", ".join(f"{each.rule}@{each.start}" for each in run.episodes)
    return [run.name, str(len(run.steps)), collapse, f"{100 * result.lost:.1f} %", alarms or "none"]


def _score_cells(score: Score) -> list[str]:
    low, high = score.false_alarms_per_1000_interval
    first, last = score.hit_rate_interval
    least, most = score.healthy_share_in_alarm_interval
    lead, collapses = score.median_lead, score.hits + score.misses
    return [
        score.rule,
        f"{score.hits}/{collapses}",
        f"{100 * first:.0f}-{100 * last:.0f} %" if collapses else "–",
        "–" if lead is None else f"{lead:g} ({min(score.leads)}-{max(score.leads)})",
        f"{score.false_alarms}/{score.armed_observations}",
        f"{score.false_alarms_per_1000:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{100 * score.healthy_share_in_alarm:.1f} %",
        f"{100 * least:.1f}-{100 * most:.1f} %",
    ]


command = Command(
    "replay recorded runs and show hits, misses, lead times and false alarms of every rule", configure, run
)
