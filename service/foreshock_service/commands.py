"""The commands `foreshock serve`, `keys`, `notify`, `remeasure`, `check`, `delete` and `retention`."""

import argparse
import os
import secrets

from foreshock.commands.option_types import COUNT, POSITIVE, STEP, filled, real


class ServeCommand:
    """`foreshock serve`: check the settings, migrate the database, serve."""

    help = "start the service: the REST API and the pages"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options; all else is set by FORESHOCK_* environment variables."""
        parser.add_argument("--host", help="address to bind (FORESHOCK_HOST, default 127.0.0.1)")
        parser.add_argument("--port", type=int, help="port to bind (FORESHOCK_PORT, default 8765)")
        parser.add_argument("--processes", type=int, help="uvicorn processes; more than one needs PostgreSQL")
        parser.add_argument(
            "--show-settings", action="store_true", help="print every setting, secrets masked, and exit"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Serve until interrupted; raises ConfigurationError for invalid settings."""
        from foreshock_service.serving import print_settings, serve

        for name in ("host", "port", "processes"):
            value = getattr(arguments, name)
            if value is not None:
                # Passed in the environment, so that every process of the service has the same settings.
                os.environ[f"FORESHOCK_{name.upper()}"] = str(value)
        os.environ.setdefault("FORESHOCK_SESSION_SECRET", secrets.token_urlsafe(32))
        if arguments.show_settings:
            print_settings()
        else:
            serve()
        return 0


class KeysCommand:
    """`foreshock keys create|list|rotate|revoke`: API keys, in the database that FORESHOCK_DATABASE_URL names."""

    help = "make, list, rotate and revoke API keys"

    def configure(self, parser: argparse.ArgumentParser) -> None:
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

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the action; raises ConfigurationError if the key or the database does not exist."""
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


class NotifyCommand:
    """`foreshock notify list|test`: the targets of FORESHOCK_NOTIFICATIONS."""

    help = "list the targets of notifications, or send a test message to one"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="list the targets; their addresses are not shown")
        test = actions.add_parser("test", help="send a test message to one target")
        test.add_argument("name", help="the target, as `list` shows it")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the action; raises ConfigurationError if the target does not exist or does not take the message."""
        from foreshock_service.watch.notifications import sending

        if arguments.action == "list":
            sending.show_targets()
        else:
            sending.send_test(arguments.name)
        return 0


class RemeasureCommand:
    """`foreshock remeasure`: measure stored rollouts again, in the database that FORESHOCK_DATABASE_URL names."""

    help = "measure stored rollouts again, after an upgrade that changed what is measured"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", nargs="?", help="a run's id, key or name (default: every run)")
        parser.add_argument("--step", type=STEP, metavar="N", help="this step only")
        parser.add_argument("--attempt", type=COUNT, metavar="N", help="this attempt only")
        parser.add_argument("--everything", action="store_true", help="also what this release has measured already")
        parser.add_argument("--dry-run", action="store_true", help="report what would be done, and change nothing")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure again; return 1 if something was left unchanged. May run beside the service, and repeatedly."""
        from foreshock_service.maintenance.remeasure import Request, remeasure

        return remeasure(
            Request(arguments.run, arguments.attempt, arguments.step, arguments.everything, arguments.dry_run)
        )


class CheckCommand:
    """`foreshock check`: compare the database with the files of the store that the settings name."""

    help = "check that the token store holds what the database says; changes nothing"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, arguments: argparse.Namespace) -> int:
        """Check; return 1 if a file differs. May run beside the service."""
        from foreshock_service.maintenance.check import check

        return check()


class DeleteCommand:
    """`foreshock delete`: delete a run, in the database that FORESHOCK_DATABASE_URL names."""

    help = "delete a run: a tombstone stays, its key stays taken"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", help="a run's id, key or name")
        parser.add_argument("--dry-run", action="store_true", help="count, and change nothing")

    def run(self, arguments: argparse.Namespace) -> int:
        """Delete; may run beside the service. Raises ConfigurationError if there is no such run."""
        from foreshock_service.maintenance.delete_runs import delete_whole_run

        delete_whole_run(arguments.run, dry_run=arguments.dry_run)
        return 0


class RetentionCommand:
    """`foreshock retention`: purge the tokens that the settings do not keep."""

    help = "purge the tokens of old steps that the settings do not keep"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options; FORESHOCK_RETENTION_* say what is kept."""
        parser.add_argument("run", nargs="?", help="a run's id, key or name (default: every run)")
        parser.add_argument("--dry-run", action="store_true", help="report what would be purged, and change nothing")

    def run(self, arguments: argparse.Namespace) -> int:
        """Purge; may run beside the service, and repeatedly. Raises ConfigurationError without a rule."""
        from foreshock_service.maintenance.retention import retention

        retention(arguments.run, dry_run=arguments.dry_run)
        return 0


serve = ServeCommand()
keys = KeysCommand()
notify = NotifyCommand()
remeasure = RemeasureCommand()
retention = RetentionCommand()
check = CheckCommand()
delete = DeleteCommand()
