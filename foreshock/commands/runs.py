"""`foreshock runs`: list the runs."""

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable

from foreshock.api.runs import RunRecord
from foreshock.api.watch import STANDING, AlertOfRun
from foreshock.commands.command import add_service_options, connect
from foreshock.commands.option_types import COUNT
from foreshock.commands.text import count, moment, table
from foreshock.severity import Severity, severity_rank

_LONGEST_NAME = 48


class RunsCommand:
    """Prints one line per run."""

    help = "list the runs of a service"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("--project", help="only the runs of this project")
        parser.add_argument("--limit", type=COUNT, default=50, metavar="N", help="at most N runs (default: 50)")
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the list."""
        with connect(arguments) as reader:
            runs = list(itertools.islice(reader.runs(), arguments.limit))
            open_alerts = {} if arguments.json or not runs else _alerts_by_run(reader.alerts_of_runs(states=STANDING))
        if arguments.json:
            print(json.dumps([dataclasses.asdict(run) for run in runs], indent=2, ensure_ascii=False))
        elif runs:
            header = ["run", "key", "project", "model", "state", "last step", "newest data", "verdict", "alerts",
                      "diagnosis"]  # fmt: skip
            rows = [_row(run, open_alerts.get(run.id, "–")) for run in runs]
            print("\n".join(table(header, rows, left=(0, 1, 2, 3, 4, 7, 8, 9), indent="")))
        else:
            print(f"{arguments.project or reader.connection.url}: no runs yet")
        return 0


def _alerts_by_run(alerts: Iterable[AlertOfRun]) -> dict[str, str]:
    """Return the open alerts of each run that has some, such as "2 critical, 1 info"."""
    counted: dict[str, Counter[Severity]] = {}
    for alert in alerts:
        counted.setdefault(alert.run, Counter())[alert.severity] += 1
    return {
        run: ", ".join(f"{found[severity]} {severity}" for severity in sorted(found, key=severity_rank))
        for run, found in counted.items()
    }


def _row(run: RunRecord, alerts: str) -> list[str]:
    newest = moment(run.updated_at_us or run.created_at_us)
    found = ("", "") if run.diagnosis is None else (run.diagnosis.verdict, run.diagnosis.headline)
    where = [run.id, _short(run.key), run.project, _short(run.model or ""), run.state, count(run.last_step), newest]
    return [*where, found[0], alerts, found[1]]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


command = RunsCommand()
