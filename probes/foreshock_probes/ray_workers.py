"""Workers as Ray actors: placed by accelerator type, and restarted by Ray if their process or node dies.

Each actor runs one worker until it is stopped or idle. Ray starts an actor again whose process dies, if necessary on
another node; the service gives its job to the next worker that asks after the lease has expired.
"""

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from foreshock.errors import ConfigurationError
from foreshock.installing import install_command
from foreshock_probes.console import WorkerConsole
from foreshock_probes.settings import WorkerSettings
from foreshock_probes.worker import Worker

_POLL_SECONDS = 1.0
_SECONDS_TO_LEAVE = 5.0


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """The number of workers, and the resources that each gets from the cluster.

    `accelerator_type` is Ray's name for the accelerator, such as "H100"; None: any node. `gpus` and `cpus` are per
    worker.
    """

    workers: int
    accelerator_type: str | None = None
    gpus: float | None = None
    cpus: float = 1.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"--workers must be at least 1, got {self.workers}")

    def options(self) -> dict[str, Any]:
        """Return the options of an actor; a worker that is placed by accelerator type has one GPU by default."""
        gpus = self.gpus if self.gpus is not None else float(self.accelerator_type is not None)
        options = {"num_cpus": self.cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": -1}
        placed = {"accelerator_type": self.accelerator_type} if self.accelerator_type is not None else {}
        # `stop` is called while `run` runs.
        return {**options, **placed, "max_concurrency": 2}


class WorkerActor:
    """A worker in a process of Ray."""

    def __init__(self, settings: WorkerSettings, scorers: tuple[str, ...] | None) -> None:
        self._settings = settings
        self._scorers = scorers
        self._worker: Worker | None = None
        self._stop_reason: str | None = None
        self._lock = threading.Lock()

    def run(self, once: bool, until_idle_seconds: float | None) -> None:
        """Run the worker until it ends. Raises ConfigurationError if its node cannot offer the scorers."""
        with self._lock:
            if self._stop_reason is not None:
                return
            self._worker = Worker(self._settings, WorkerConsole(), scorers=self._scorers)
        self._worker.run(once=once, until_idle_seconds=until_idle_seconds)

    def stop(self, reason: str) -> None:
        """Stop the worker as a signal does; a second call ends its job at once."""
        with self._lock:
            self._stop_reason = reason
            worker = self._worker
        if worker is not None:
            worker.stop(reason)


class RayWorkers:
    """Starts workers on the Ray cluster of RAY_ADDRESS (without it, only on this machine) and waits for their end.

    Raises ConfigurationError if Ray is not installed or its cluster does not answer.
    """

    def __init__(
        self, settings: WorkerSettings, console: WorkerConsole, placement: RayPlacement, scorers: tuple[str, ...] | None
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(f"--ray needs Ray; install it with: {install_command('ray')}") from error
        self._ray: Any = ray
        if not ray.is_initialized():
            # Started here, because Ray sets its own handler of SIGTERM, which the command replaces afterwards.
            try:
                ray.init()
            except ConnectionError as error:
                raise ConfigurationError(
                    f"no Ray cluster answers: {error}; check RAY_ADDRESS; set RAY_AUTH_MODE=token if it wants a token"
                ) from error
        self._settings, self._placement, self._scorers, self._log = settings, placement, scorers, console.log
        self._actors: list[Any] = []
        self._stops: list[str] = []

    def stop(self, reason: str) -> None:
        """Stop every worker; a second call ends their jobs at once. Safe to call from a signal handler."""
        self._stops.append(reason)

    def run(self, *, once: bool = False, until_idle_seconds: float | None = None) -> int:
        """Start the workers, wait until all have ended, and return the number of those that failed."""
        self._log_placement()
        actor = self._ray.remote(WorkerActor).options(**self._placement.options())
        for number in range(self._placement.workers):
            settings = self._settings.model_copy(update={"worker_name": f"{self._settings.worker_name}-{number}"})
            self._actors.append(actor.remote(settings, self._scorers))
        running = {each.run.remote(once, until_idle_seconds): name for name, each in enumerate(self._actors)}
        failed, told, end = 0, 0, math.inf
        try:
            while running and time.monotonic() < end:
                ended, _ = self._ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
                for reference in ended:
                    failed += self._has_failed(reference, running.pop(reference))
                while told < len(self._stops):
                    for each in self._actors:
                        each.stop.remote(self._stops[told])
                    told += 1
                    # Wait only this long, because a worker that was never placed does not answer.
                    end = time.monotonic() + self._settings.shutdown_grace_seconds + _SECONDS_TO_LEAVE
        finally:
            for each in self._actors:
                self._ray.kill(each)
        return failed

    def _has_failed(self, reference: Any, number: int) -> bool:
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._log(f"worker {number} failed: {error}")
            return True
        self._log(f"worker {number} has ended")
        return False

    def _log_placement(self) -> None:
        wanted, available = self._placement.accelerator_type, self._ray.cluster_resources()
        self._log(f"starting {self._placement.workers} workers on Ray, each with {self._placement.options()}")
        if wanted is not None and f"accelerator_type:{wanted}" not in available:
            prefix = "accelerator_type:"
            known = sorted(name.removeprefix(prefix) for name in available if name.startswith(prefix))
            has = ", ".join(known) or "none"
            self._log(f"the cluster has no accelerator of type {wanted} (it has: {has}): the workers wait for one")
