"""`foreshock runs`: list the runs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json

from foreshock.api.runs import RunRecord
from foreshock.commands.command import add_service_options, connect
from foreshock.commands.queries import list_runs
from foreshock.commands.text import count, moment, table


class RunsCommand:
    """Prints one line per run."""

    help = "list the runs of a service"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("--project", help="only the runs of this project")
        parser.add_argument("--limit", type=int, default=50, metavar="N", help="at most N runs (default: 50)")
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the list."""
        with connect(arguments) as connection:
            runs = list(itertools.islice(list_runs(connection, arguments.project), arguments.limit))
        if arguments.json:
            print(json.dumps([dataclasses.asdict(run) for run in runs], indent=2, ensure_ascii=False))
        elif runs:
            header = ["run", "key", "project", "model", "state", "last step", "newest data", "diagnosis"]
            rows = [_row(run) for run in runs]
            print("\n".join(table(header, rows, left=(0, 1, 2, 3, 4, 7), indent="")))
        else:
            print(f"{arguments.project or connection.url}: no runs yet")
        return 0


def _row(run: RunRecord) -> list[str]:
    newest = moment(run.updated_at_us or run.created_at_us)
    headline = "" if run.diagnosis is None else run.diagnosis.headline
    return [run.id, run.key, run.project, run.model or "", run.state, count(run.last_step), newest, headline]


command = RunsCommand()
