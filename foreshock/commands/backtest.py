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
    from foreshock.backtest.scoring import BacktestResult


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
    from foreshock.backtest.cells import RUN_HEADER, SCORE_HEADER, answer_in_words, run_cells, score_cells

    lines = [*answer_in_words(result), ""]
    lines += table(RUN_HEADER, [run_cells(each) for each in result.runs], left=(0, 2, 4), indent="")
    if not full:
        return [*lines, "", "Every rule: --full"]
    scores = table(SCORE_HEADER, [score_cells(each) for each in result.rules], left=(0,), indent="")
    return [*lines, "", "rules", *scores]


command = Command(
    "replay recorded runs and show hits, misses, lead times and false alarms of every rule", configure, run
)
