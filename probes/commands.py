"""`foreshock worker`: lease probes and score them."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from foreshock.errors import ConfigurationError
from probes.console import WorkerConsole
from probes.settings import load_settings
from probes.worker import Worker

__all__ = ["WorkerCommand", "worker"]


class WorkerCommand:
    """Run a worker until it is stopped, until one job is done (`--once`), or until there is no more work."""

    help = "score rollouts through real engines, as the service's probes ask for it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to `parser`; what is not given comes from FORESHOCK_* variables."""
        parser.add_argument("--url", help="the service's address (FORESHOCK_URL)")
        parser.add_argument("--name", help="this worker's name (FORESHOCK_WORKER_NAME)")
        parser.add_argument("--accelerator", help="the kind of hardware offered, such as cpu (FORESHOCK_ACCELERATOR)")
        parser.add_argument(
            "--weights-roots",
            metavar="NAME=/FOLDER,…",
            help="folders of checkpoints by the names that runs announce (FORESHOCK_WEIGHTS_ROOTS)",
        )
        parser.add_argument("--scorers", metavar="NAME,…", help="offer only these scorers")
        ends = parser.add_mutually_exclusive_group()
        ends.add_argument("--once", action="store_true", help="leave after one job")
        ends.add_argument(
            "--until-idle", type=float, metavar="SECONDS", help="leave when there was no job for so many seconds"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the worker; 0 when it left as asked, 2 when its settings make no sense."""
        console = WorkerConsole()
        try:
            settings = load_settings(
                url=arguments.url,
                worker_name=arguments.name,
                accelerator=arguments.accelerator,
                weights_roots=arguments.weights_roots,
            )
            scorers = tuple(arguments.scorers.split(",")) if arguments.scorers else None
            worker = Worker(settings, console, scorers=scorers)
        except ConfigurationError as error:
            console.say(f"foreshock worker: {error}")
            return 2

        def stop(number: int, _: FrameType | None) -> None:
            worker.stop(signal.Signals(number).name)

        earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            worker.run(once=arguments.once, until_idle_seconds=arguments.until_idle)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
        return 0


worker = WorkerCommand()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m probes.commands")
    worker.configure(parser)
    sys.exit(worker.run(parser.parse_args()))
