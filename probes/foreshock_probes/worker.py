"""The worker: lease a job, run its scorers in a process, upload the scores, repeat.

Every failure is logged and handled in one of four ways: service unavailable (retry with backoff), lease lost (drop the
job), job not possible (fail it with the reason), worker stopped (finish within the grace time, else return the job).
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from foreshock.api.leases import LeaseRecord
from foreshock.errors import ServiceError
from foreshock.json_values import given
from foreshock.retry import Backoff, sleep_until_stopped
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.console import WorkerConsole
from foreshock_probes.job_scoring import (
    FIRST_RETRY_SECONDS,
    LONGEST_RETRY_SECONDS,
    LeasedJob,
    call_service,
    failure_of,
)
from foreshock_probes.offers import offers_of_machine
from foreshock_probes.service_client import FailKind, LeaseClient, LeaseLostError
from foreshock_probes.settings import WorkerSettings
from foreshock_probes.weights import WeightsLibrary
from foreshock_probes.work_folder import work_folder

# The service keeps 2,000 characters, including a prefix of its own.
_LONGEST_REASON = 1_800
_LONGEST_DOING = 300
_OUTCOMES = {"retry": "failed, will be retried", "final": "failed", "skipped": "skipped"}


class Worker:
    """One worker. `scorers`: offer only these; None: all whose engine is installed.

    Raises ConfigurationError if a scorer is unknown or its engine is not installed.
    """

    def __init__(
        self, settings: WorkerSettings, console: WorkerConsole, *, scorers: tuple[str, ...] | None = None
    ) -> None:
        self._settings = settings
        self._console = console
        self._offers = offers_of_machine(settings.accelerator, scorers)
        self._library = WeightsLibrary(settings.weights_roots)
        self._client = self._connect()
        self._stop_reason: str | None = None
        self._stop_at = math.inf
        self._is_waiting_for_job = False
        self._backoff = Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS)

    def stop(self, reason: str) -> None:
        """Lease no further job and finish the current job within the grace time; a second call ends it immediately.

        Safe to call from a signal handler.
        """
        again = self._stop_reason is not None
        self._stop_reason = reason
        self._stop_at = time.monotonic() + (0.0 if again else self._settings.shutdown_grace_seconds)
        if self._is_waiting_for_job and not again:
            threading.Thread(target=self._interrupt, daemon=True).start()

    def run(self, *, once: bool = False, until_idle_seconds: float | None = None) -> int:
        """Work until stopped; with `once`, for one job; with `until_idle_seconds`, until no job came for that long.

        The return value 0 is the number of workers that failed.
        """
        self._log_settings()
        with closing(self._client), work_folder() as folder:
            idle_since = time.monotonic()
            while not self._stopping():
                lease = self._next_lease(idle_since, until_idle_seconds)
                if lease is not None:
                    with tempfile.TemporaryDirectory(prefix="job-", dir=folder) as of_job:
                        self._run_job(lease, Path(of_job))
                    idle_since = time.monotonic()
                    if once:
                        break
                elif until_idle_seconds is not None and time.monotonic() - idle_since >= until_idle_seconds:
                    self._console.log(f"no job for {until_idle_seconds:g} s: exiting")
                    break
        if self._stop_reason is not None:
            self._console.log(f"stopped ({self._stop_reason})")
        return 0

    def _next_lease(self, idle_since: float, until_idle_seconds: float | None) -> LeaseRecord | None:
        """Return a lease on the next job, None if there is none now. Retries without limit if the service is down."""
        wait = self._settings.lease_wait_seconds
        if until_idle_seconds is not None:
            wait = max(0.0, min(wait, idle_since + until_idle_seconds - time.monotonic()))
        self._is_waiting_for_job = True
        try:
            if self._stopping():
                return None
            lease = self._client.take(
                wait,
                worker=self._settings.worker_name,
                accelerator=self._offers.accelerator,
                device_name=self._offers.device_name[:200],
                scorers=self._offers.requirements,
                environments=list(self._offers.environments),
                exact_pairs=self._offers.exact_pairs,
            )
            self._backoff.reset()
            return lease
        except ServiceError as error:
            self._is_waiting_for_job = False
            if not self._stopping():
                delay = self._backoff.next_delay(error.retry_after_seconds)
                self._console.log(f"{error}; retrying in {delay:.1f} s")
                sleep_until_stopped(self._stopping)(delay)
            return None
        finally:
            self._is_waiting_for_job = False

    def _interrupt(self) -> None:
        # Repeated, because the connection may not be open at the first call.
        while self._is_waiting_for_job:
            self._client.interrupt()
            time.sleep(0.1)

    def _run_job(self, lease: LeaseRecord, folder: Path) -> None:
        """Run the leased job and report its outcome to the service."""
        job = lease.job
        leased = LeasedJob(
            lease, self._client, self._offers, self._library, folder, self._console,
            lambda: lost.is_set() or time.monotonic() > self._stop_at, self._settings.engine_silence_seconds,
        )  # fmt: skip
        pairs = [EXACT_PAIRS[key].name for key in job.exact_pairs]
        names = ", ".join([*(each.name for each in job.scorers), *pairs])
        leased.log(f"{names} on {job.rollouts.count} rollouts of step {job.step} of {job.run}")
        with heartbeats(lease, self._connect, leased.doing) as lost:
            try:
                leased.run()
                leased.call("POST", "complete", json_body={"token": lease.token})
                leased.log("done")
            except Exception as error:
                if lost.is_set() or isinstance(error, LeaseLostError):
                    leased.log("dropped, lease lost")
                else:
                    self._fail(leased, *failure_of(error, self._stop_reason, self._console))

    def _fail(self, leased: LeasedJob, kind: FailKind, reason: str) -> None:
        leased.log(f"{_OUTCOMES[kind]}: {reason}")
        if len(reason) > _LONGEST_REASON:
            half = _LONGEST_REASON // 2 - 10
            reason = f"{reason[:half]}\n[…]\n{reason[-half:]}"  # the end has the engine's last output
        body = {"token": leased.lease.token, "reason": reason or "no reason was given", "kind": kind}
        call = partial(self._client.on_lease, "POST", leased.lease, "fail", json_body=body)
        try:
            # A short deadline: without the report, the lease expires and the job is retried without a reason.
            call_service(call, lambda: False, self._console, deadline_seconds=30.0)
        except ServiceError as error:
            leased.log(f"the failure could not be reported: {error}")

    def _connect(self) -> LeaseClient:
        key = self._settings.api_key
        return LeaseClient(self._settings.url, key.get_secret_value() if key else None)

    def _stopping(self) -> bool:
        return self._stop_reason is not None

    def _log_settings(self) -> None:
        for name, value in self._settings.shown().items():
            self._console.log(f"{name}: {value}")
        self._console.log(f"offering {self._offers.in_words()}")
        if not self._settings.weights_roots:
            self._console.log(
                "no weights root is configured, so no checkpoint can be loaded; set "
                "FORESHOCK_WEIGHTS_ROOTS='name=/folder/of/checkpoints,name@project=/folder'"
            )


@contextlib.contextmanager
def heartbeats(
    lease: LeaseRecord, connect: Callable[[], LeaseClient], doing: Callable[[], str]
) -> Iterator[threading.Event]:
    """Send heartbeats for a lease within the block, each with the answer of `doing`.

    The event is set if the service answers that the lease is no longer held. If the service is unavailable, the job
    continues, and the service checks the fencing token when the scores are uploaded.
    """
    lost, done = threading.Event(), threading.Event()

    def beat() -> None:
        with connect() as client:
            while not lost.is_set() and not done.wait(max(0.05, lease.heartbeat_seconds)):
                try:
                    body = {"token": lease.token, **given({"doing": doing()[:_LONGEST_DOING] or None})}
                    client.on_lease("POST", lease, "heartbeat", json_body=body, timeout_seconds=10.0)
                except LeaseLostError:
                    lost.set()
                except ServiceError:
                    continue

    thread = threading.Thread(target=beat, name=f"heartbeat-{lease.lease}", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join(timeout=15.0)
