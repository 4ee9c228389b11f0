"""`foreshock runs`: list the runs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json

from foreshock.api.runs import HealthRecord, RunRecord
from foreshock.commands.command import add_service_options, connect
from foreshock.commands.queries import RunQueries, list_runs
from foreshock.commands.text import count, moment, number, table
from foreshock.interval_names import INTERVAL

__all__ = ["command"]


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
            healths = [RunQueries(connection, run.id).health() for run in runs] if not arguments.json else []
        if arguments.json:
            print(json.dumps([dataclasses.asdict(run) for run in runs], indent=2, ensure_ascii=False))
        elif runs:
            header = ["run", "key", "project", "model", "state", "last step", "k3, newest steps", "", "newest data"]
            rows = [_row(run, health) for run, health in zip(runs, healths, strict=True)]
            print("\n".join(table(header, rows, left=(0, 1, 2, 3, 4, 7), indent="")))
        else:
            print(f"{arguments.project or connection.url}: no runs yet")
        return 0


def _row(run: RunRecord, health: HealthRecord) -> list[str]:
    newest = run.updated_at_us or run.created_at_us
    description = [run.id, run.key, run.project, run.model or "", run.state, count(run.last_step)]
    return [*description, _mismatch(health), health.verdict, moment(newest)]


def _mismatch(health: HealthRecord) -> str:
    """Return k3 pooled over the newest steps, with its interval, marked if it is no 95 % interval."""
    if not health.measures:
        return "–"
    k3 = health.measures[0]
    mark = "" if k3.interval == INTERVAL else "~"
    return f"{number(k3.mean, 2)} ({number(k3.low, 2)} … {number(k3.high, 2)}{mark})"


command = RunsCommand()
