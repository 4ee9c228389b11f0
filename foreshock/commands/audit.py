"""`foreshock audit`: who changed advice, alerts, runs and keys."""

import argparse
import itertools
import json

from foreshock.api.records import to_json
from foreshock.api.service import AuditRecord
from foreshock.client.connection import ServiceConnection
from foreshock.commands.command import add_project_option, add_service_options, connect
from foreshock.commands.option_types import COUNT
from foreshock.commands.queries import find_run
from foreshock.commands.text import moment, table
from foreshock.reading.caller import items_of
from foreshock.reading.reader import Reader


class AuditCommand:
    """Prints one line per change, newest first."""

    help = "list who changed advice, alerts, runs and keys (needs a key with the scope admin)"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("--actor", help="only changes by this key (its id) or actor")
        parser.add_argument("--action", help="only this action, such as run.delete")
        parser.add_argument("--run", metavar="RUN", help="only changes of this run: its id, key or name")
        add_project_option(parser)
        parser.add_argument("--limit", type=COUNT, default=50, metavar="N", help="at most N changes (default: 50)")
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the list."""
        with connect(arguments) as connection:
            entries = _entries(connection, arguments, arguments.run)
            if not entries and arguments.run is not None:
                # By id first: find_run does not find deleted runs.
                entries = _entries(connection, arguments, find_run(connection, arguments.run, arguments.project).id)
        if arguments.json:
            print(json.dumps([to_json(entry) for entry in entries], indent=2, ensure_ascii=False))
        elif entries:
            header = ["time", "who", "what", "of", "project", "change", "request"]
            print("\n".join(table(header, [_row(entry) for entry in entries], left=range(7), indent="")))
        else:
            print("no change is recorded")
        return 0


def _entries(connection: ServiceConnection, arguments: argparse.Namespace, run_id: str | None) -> list[AuditRecord]:
    asked = Reader.audit.request(actor=arguments.actor, action=arguments.action, run_id=run_id)
    return list(itertools.islice(items_of(connection, asked), arguments.limit))


def _row(entry: AuditRecord) -> list[str]:
    change = " → ".join(
        ", ".join(f"{name}={value}" for name, value in values.items())
        for values in (entry.before, entry.after)
        if values
    )
    shown = [moment(entry.at_us), entry.actor, entry.action, entry.subject, entry.project or "–"]
    return [*shown, change, entry.request_id or "–"]


command = AuditCommand()
