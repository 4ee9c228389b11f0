"""`foreshock spool list|resend|drop`: the items that the service rejected, and what waits on this machine's disk."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from foreshock.client.connection import ServiceConnection
from foreshock.client.registrar import Registrar
from foreshock.client.rejected import DAMAGED, RejectedItem, RejectedItems
from foreshock.client.reporting import LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import waiting_folders
from foreshock.commands.command import add_service_options
from foreshock.commands.text import moment, table
from foreshock.diagnosis.wording import plural
from foreshock.errors import ConfigurationError, ServiceError, ServiceUnavailable, SpoolError


class SpoolCommand:
    """Lists, sends again and deletes rejected items of a spool directory."""

    help = "list what the service rejected or has not received yet, send it again, or drop it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the three actions."""
        actions = parser.add_subparsers(dest="action", required=True)
        listed = actions.add_parser("list", help="print the rejected items with their reason, and what waits")
        listed.add_argument("--json", action="store_true", help="print JSON instead of text")
        for name, text in (
            ("resend", "send rejected items again, after the cause was corrected; what is accepted is deleted"),
            ("drop", "delete rejected items"),
        ):
            action = actions.add_parser(name, help=text)
            action.add_argument("items", nargs="*", metavar="ITEM", help="names, as `list` shows them")
            action.add_argument("--all", action="store_true", help="every rejected item")
            action.add_argument("--run", metavar="PROJECT/KEY", help="every rejected item of this run")
            _add_place(action)
        _add_place(listed)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the action. Exit status of `resend`: 1 if the service did not accept all. Raises ConfigurationError."""
        settings = ClientSettings.resolve(arguments.url, arguments.api_key, arguments.directory)
        rejected = RejectedItems(settings.spool_directory, max_bytes=settings.max_rejected_bytes)
        if arguments.action == "list":
            _print_list(rejected.items(), settings.spool_directory, as_json=arguments.json)
            return 0
        chosen = _chosen(rejected.items(), arguments)
        if arguments.action == "drop":
            for item in chosen:
                rejected.drop(item)
            print(f"{plural(len(chosen), 'item')} dropped")
            return 0
        return _resend(rejected, chosen, settings)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", type=Path, help="the spool (default: FORESHOCK_SPOOL_DIRECTORY, else that of the address)"
    )
    add_service_options(parser)


def _chosen(items: Sequence[RejectedItem], arguments: argparse.Namespace) -> list[RejectedItem]:
    """Return the items that the arguments name. Raises ConfigurationError for an unknown name, or for none."""
    if not (arguments.items or arguments.all or arguments.run):
        raise ConfigurationError("name the items, or use --all or --run PROJECT/KEY; `foreshock spool list` shows them")
    if arguments.all:
        return list(items)
    unknown = sorted(set(arguments.items) - {item.name for item in items})
    if unknown:
        raise ConfigurationError(f"no rejected item {unknown[0]!r}; `foreshock spool list` shows them")
    return [item for item in items if item.name in arguments.items or (arguments.run and item.run == arguments.run)]


def _resend(rejected: RejectedItems, items: Sequence[RejectedItem], settings: ClientSettings) -> int:
    """Send the items in order, each one once; keep refused ones with the new answer. Return the exit status."""
    sent = 0
    with ServiceConnection(settings.url, settings.api_key, timeout_seconds=settings.timeout_seconds) as connection:
        registrar = Registrar(connection, LogOnce("foreshock.commands"))
        for item in items:
            try:
                delivery = item.delivery()
            except (ValueError, SpoolError, OSError) as error:
                print(f"{item.name}: cannot be sent: {error}", file=sys.stderr)
                continue
            try:
                registrar.send(delivery)
            except ServiceUnavailable:
                print(f"{sent} of {plural(len(items), 'item')} sent; the others are kept", file=sys.stderr)
                raise
            except ServiceError as error:
                print(f"{item.name}: refused again: {error}", file=sys.stderr)
                rejected.note_problem(item, {"status": error.status, **error.problem})
                continue
            rejected.drop(item)
            sent += 1
    print(f"{sent} of {plural(len(items), 'item')} sent")
    return 0 if sent == len(items) else 1


def _print_list(items: Sequence[RejectedItem], directory: Path, *, as_json: bool) -> None:
    waiting = waiting_folders(directory)
    records = [_record(item) for item in items]
    if as_json:
        folders = [{"folder": str(each.path), "items": each.items, "bytes": each.bytes} for each in waiting]
        print(json.dumps({"directory": str(directory), "rejected": records, "waiting": folders}, indent=2))
        return
    for each in waiting:
        owner = "of a running process" if each.in_use else "sent by the next client of its project and key"
        print(f"waiting: {each.items} items, {each.bytes:,} bytes in {each.path.name} ({owner})")
    if not items:
        print(f"{directory}: nothing was rejected")
        return
    rows = [[str(value) for value in record.values()] for record in records]
    print("\n".join(table([*records[0]], rows, left=(0, 1, 2, 3, 5), indent="")))


def _record(item: RejectedItem) -> dict[str, object]:
    """Return the columns of an item, in order."""
    when, _, _ = item.name.partition("-")
    unreadable = "damaged" if item.name.startswith(DAMAGED) or not item.request else "no reason was recorded"
    status = item.problem.get("status")
    answer = item.problem.get("detail") or item.problem.get("title") or unreadable
    return {
        "item": item.name,
        "run": item.run,
        "request": f"{item.request.get('method', '')} {item.request.get('path', '')}".strip(),
        "rejected": moment(int(when)) if when.isdecimal() else "",
        "bytes": item.body_path.stat().st_size if item.body_path.exists() else 0,
        "answer": f"{status}: {answer}" if status else str(answer),
    }


command = SpoolCommand()
