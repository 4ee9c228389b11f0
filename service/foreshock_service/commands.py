"""The commands `foreshock serve`, `keys`, `notify`, `remeasure`, `check`, `delete` and `retention`."""

import argparse
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from foreshock.commands.option_types import COUNT, POSITIVE, STEP, filled, real


@dataclass(frozen=True)
class ServiceCommand:
    """A command: its line of `foreshock --help`, what adds its options, and what runs it and returns the status.

    `run` imports what it needs. It raises ConfigurationError for invalid settings, and for a database, run or key that
    does not exist.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int]


def _configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to bind (FORESHOCK_HOST, default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to bind (FORESHOCK_PORT, default 8765)")
    parser.add_argument("--processes", type=int, help="uvicorn processes; more than one needs PostgreSQL")
    parser.add_argument("--show-settings", action="store_true", help="print every setting, secrets masked, and exit")


def _serve(arguments: argparse.Namespace) -> int:
    from foreshock_service.serving import print_settings, serve

    for name in ("host", "port", "processes"):
        value = getattr(arguments, name)
        if value is not None:
            # Passed in the environment, so that every process of the service has the same settings.
            os.environ[f"FORESHOCK_{name.upper()}"] = str(value)
    os.environ.setdefault("FORESHOCK_SESSION_SECRET", secrets.token_urlsafe(32))
    (print_settings if arguments.show_settings else serve)()
    return 0


def _configure_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="make a key and print it, once")
    create.add_argument("name", type=filled, help="what it is for, such as `trainer`")
    create.add_argument("--project", type=filled, help="the project it is bound to; without: every project")
    create.add_argument(
        "--scope",
        action="append",
        choices=["ingest", "read", "worker", "admin"],
        help="may be repeated (default: ingest and read)",
    )
    create.add_argument("--expires", type=POSITIVE, metavar="DAYS", help="valid for so long (default: for ever)")
    actions.add_parser("list", help="list keys, when each was used last; their secrets are not stored")
    rotate = actions.add_parser("rotate", help="give a key another secret, and print it, once")
    rotate.add_argument("key", help="its id, as `list` shows it")
    rotate.add_argument(
        "--overlap",
        type=real(),
        default=24.0,
        metavar="HOURS",
        help="how long the secret before stays valid (default: 24; 0 ends it at once)",
    )
    revoke = actions.add_parser("revoke", help="make a key useless from now on")
    revoke.add_argument("key", help="its id, as `list` shows it")


def _keys(arguments: argparse.Namespace) -> int:
    from foreshock_service.maintenance import keys

    if arguments.action == "create":
        keys.create(arguments.name, arguments.project, arguments.scope or ["ingest", "read"], arguments.expires)
    elif arguments.action == "list":
        keys.show()
    elif arguments.action == "rotate":
        keys.rotate(arguments.key, arguments.overlap)
    else:
        keys.revoke(arguments.key)
    return 0


def _configure_notify(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="list the targets; their addresses are not shown")
    test = actions.add_parser("test", help="send a test message to one target")
    test.add_argument("name", help="the target, as `list` shows it")


def _notify(arguments: argparse.Namespace) -> int:
    from foreshock_service.watch.notifications import sending

    if arguments.action == "list":
        sending.show_targets()
    else:
        sending.send_test(arguments.name)
    return 0


def _configure_remeasure(parser: argparse.ArgumentParser) -> None:
    _configure_retention(parser)
    parser.add_argument("--step", type=STEP, metavar="N", help="this step only")
    parser.add_argument("--attempt", type=COUNT, metavar="N", help="this attempt only")
    parser.add_argument("--everything", action="store_true", help="also what this release has measured already")


def _remeasure(arguments: argparse.Namespace) -> int:
    from foreshock_service.maintenance.remeasure import Request, remeasure

    return remeasure(Request(arguments.run, arguments.attempt, arguments.step, arguments.everything, arguments.dry_run))


def _check(_: argparse.Namespace) -> int:
    from foreshock_service.maintenance.check import check

    return check()


def _configure_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's id, key or name")
    parser.add_argument("--dry-run", action="store_true", help="count, and change nothing")


def _delete(arguments: argparse.Namespace) -> int:
    from foreshock_service.maintenance.delete_runs import delete_whole_run

    delete_whole_run(arguments.run, dry_run=arguments.dry_run)
    return 0


def _configure_retention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="a run's id, key or name (default: every run)")
    parser.add_argument("--dry-run", action="store_true", help="report what would be done, and change nothing")


def _retention(arguments: argparse.Namespace) -> int:
    from foreshock_service.maintenance.retention import retention

    retention(arguments.run, dry_run=arguments.dry_run)
    return 0


serve = ServiceCommand("start the service: the REST API and the pages", _configure_serve, _serve)
keys = ServiceCommand("make, list, rotate and revoke API keys", _configure_keys, _keys)
notify = ServiceCommand("list the targets of notifications, or send a test message to one", _configure_notify, _notify)
remeasure = ServiceCommand(
    "measure stored rollouts again, after an upgrade that changed what is measured", _configure_remeasure, _remeasure
)
check = ServiceCommand(
    "check that the token store holds what the database says; changes nothing", lambda parser: None, _check
)
delete = ServiceCommand("delete a run: a tombstone stays, its key stays taken", _configure_delete, _delete)
retention = ServiceCommand(
    "purge the tokens of old steps that the settings do not keep", _configure_retention, _retention
)
