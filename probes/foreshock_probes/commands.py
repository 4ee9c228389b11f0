"""`foreshock worker`: lease probes and score them."""

import argparse
import signal
import sys
from types import FrameType

from foreshock.commands.option_types import COUNT, SECONDS, real
from foreshock.errors import ConfigurationError
from foreshock_probes.console import WorkerConsole
from foreshock_probes.ray_workers import RayPlacement, RayWorkers
from foreshock_probes.settings import load_settings
from foreshock_probes.worker import Worker


class WorkerCommand:
    """Run a worker until it is stopped, for one job (`--once`), or until it is idle (`--until-idle`)."""

    help = "lease the service's probes and score their rollouts with the installed engines"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to `parser`. Their defaults are FORESHOCK_* variables."""
        parser.add_argument("--url", help="URL of the service (default: FORESHOCK_URL)")
        parser.add_argument("--name", help="name of this worker (default: FORESHOCK_WORKER_NAME, else host:pid)")
        parser.add_argument(
            "--accelerator", help="accelerator type, such as cpu (default: FORESHOCK_ACCELERATOR, else detected)"
        )
        parser.add_argument(
            "--weights-roots",
            metavar="NAME[@PROJECT]=/FOLDER,…",
            help="checkpoint folders by announced root name (default: FORESHOCK_WEIGHTS_ROOTS)",
        )
        parser.add_argument(
            "--scorers", metavar="NAME,…", help="offer only these scorers (default: all whose engine is installed)"
        )
        cluster = parser.add_argument_group("on a Ray cluster")
        cluster.add_argument("--ray", action="store_true", help="run the workers as Ray actors (RAY_ADDRESS)")
        cluster.add_argument("--workers", type=COUNT, default=1, metavar="N", help="number of workers (default: 1)")
        cluster.add_argument("--accelerator-type", metavar="NAME", help="Ray's name of the accelerator, such as H100")
        cluster.add_argument(
            "--gpus-per-worker", type=real(), metavar="N", help="default: 1 with --accelerator-type, else 0"
        )
        cluster.add_argument("--cpus-per-worker", type=real(), default=1.0, metavar="N", help="default: 1")
        ends = parser.add_mutually_exclusive_group()
        ends.add_argument("--once", action="store_true", help="exit after one job")
        ends.add_argument("--until-idle", type=SECONDS, metavar="SECONDS", help="exit after SECONDS without a job")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the worker and return the exit status.

        0 after a regular end, 1 if a worker on Ray failed, 2 if the settings are invalid.
        """
        console = WorkerConsole()
        try:
            settings = load_settings(
                url=arguments.url,
                worker_name=arguments.name,
                accelerator=arguments.accelerator,
                weights_roots=arguments.weights_roots,
            )
            scorers = tuple(arguments.scorers.split(",")) if arguments.scorers else None
            worker: Worker | RayWorkers
            if arguments.ray:
                placement = RayPlacement(
                    arguments.workers, arguments.accelerator_type, arguments.gpus_per_worker, arguments.cpus_per_worker
                )
                worker = RayWorkers(settings, console, placement, scorers)
            elif arguments.workers != 1 or arguments.accelerator_type is not None:
                raise ConfigurationError("--workers and --accelerator-type are options of --ray")
            else:
                worker = Worker(settings, console, scorers=scorers)
        except ConfigurationError as error:
            console.log(f"foreshock worker: {error}")
            return 2

        def stop(number: int, _: FrameType | None) -> None:
            worker.stop(signal.Signals(number).name)

        earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            failed = worker.run(once=arguments.once, until_idle_seconds=arguments.until_idle)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
        return 1 if failed else 0


worker = WorkerCommand()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m foreshock_probes.commands")
    worker.configure(parser)
    sys.exit(worker.run(parser.parse_args()))
