"""`foreshock runs`: list the runs."""

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping

from foreshock.api.runs import RunRecord
from foreshock.api.watch import STANDING, AlertOfRun
from foreshock.commands.command import Command, add_service_options, connect
from foreshock.commands.option_types import COUNT
from foreshock.commands.text import count, table
from foreshock.severity import Severity, severity_rank

_LONGEST_KEY = 30


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", help="only the runs of this project")
    parser.add_argument("--limit", type=COUNT, default=50, metavar="N", help="at most N runs (default: 50)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    with connect(arguments) as reader:
        runs = list(itertools.islice(reader.runs(), arguments.limit))
        open_alerts = {} if arguments.json or not runs else _alerts_by_run(reader.alerts_of_runs(states=STANDING))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(run) for run in runs], indent=2, ensure_ascii=False))
    elif runs:
        header, *lines = table(_HEADER, [_row(run, open_alerts) for run in runs], left=(0, 1, 4, 5), indent="")
        print(header)
        for run, line in zip(runs, lines, strict=True):
            print(f"{line}\n  {'no diagnosis yet' if run.diagnosis is None else run.diagnosis.short}")
    else:
        print(f"{arguments.project or reader.connection.url}: no runs yet")
    return 0


def _alerts_by_run(alerts: Iterable[AlertOfRun]) -> dict[str, str]:
    """Return the open alerts of each run that has some, such as "2 crit, 1 info"."""
    counted: dict[str, Counter[Severity]] = {}
    for alert in alerts:
        counted.setdefault(alert.run, Counter())[alert.severity] += 1
    return {
        run: ", ".join(f"{found[severity]} {_SHORT[severity]}" for severity in sorted(found, key=severity_rank))
        for run, found in counted.items()
    }


_SHORT: dict[Severity, str] = {"critical": "crit", "warning": "warn", "info": "info"}
_HEADER = ["run", "verdict", "since", "step", "state", "open alerts"]


def _row(run: RunRecord, alerts: Mapping[str, str]) -> list[str]:
    found, key = run.diagnosis, run.key
    verdict, since = ("–", None) if found is None else (found.verdict, found.since)
    short = key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 1]}…"
    return [short, verdict, count(since), count(run.last_step), run.state, alerts.get(run.id, "–")]


command = Command("list the runs of a service", configure, run)
