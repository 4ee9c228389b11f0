"""The worker: takes a job, has its scorers run in their engines, uploads the scores, takes the next one.

Whatever goes wrong ends in one of four ways, all of them told: the service is away (wait and go on), the lease is lost
(drop the work, nobody wants it), the job cannot be done (fail it with the reason), the worker is told to stop (finish
within the grace time, else hand the job back).
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from foreshock.errors import ConfigurationError, ForeshockError, ServiceError, ServiceUnavailable
from foreshock.retry import Backoff, retry, sleep_until_stopped
from probes.console import WorkerConsole
from probes.engines.pool import EnginePool
from probes.engines.process import EngineError, JobAbandonedError, Patience
from probes.engines.protocol import ScoreCommand
from probes.hardware import accelerator_name, device_name
from probes.heartbeat import Heartbeat
from probes.scorers.request import UnsupportedScoreError
from probes.scorers.table import installed_scorers, scorer_named
from probes.service_client import (
    Checkpoint,
    FailKind,
    Lease,
    LeaseClient,
    LeaseLostError,
    RequestedScorer,
)
from probes.settings import WorkerSettings
from probes.weights import (
    AnnouncedCheckpoint,
    UnknownRootError,
    Weights,
    WeightsGoneError,
    WeightsLibrary,
)

__all__ = ["Worker"]

T = TypeVar("T")

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
_WORDS = {"retry": "failed, to be tried again", "final": "failed", "skipped": "skipped"}


class Worker:
    """One worker. `scorers`: offer only these; None: all whose engine is installed.

    Raises ConfigurationError where a scorer is unknown or no engine is installed.
    """

    def __init__(
        self, settings: WorkerSettings, console: WorkerConsole, *, scorers: tuple[str, ...] | None = None
    ) -> None:
        self._settings = settings
        self._console = console
        self._scorers = _offered(scorers)
        self._accelerator = accelerator_name(settings.accelerator)
        self._library = WeightsLibrary(settings.weights_roots)
        self._client = self._connect()
        self._stop_reason: str | None = None
        self._stop_at = math.inf
        self._waiting_for_a_job = False
        self._backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)

    def stop(self, reason: str) -> None:
        """Take no further job, finish the present one within the grace time; a second call ends that at once.

        Safe to call from a signal handler.
        """
        again = self._stop_reason is not None
        self._stop_reason = reason
        self._stop_at = time.monotonic() + (0.0 if again else self._settings.shutdown_grace_seconds)
        if self._waiting_for_a_job and not again:
            threading.Thread(target=self._interrupt, daemon=True).start()

    def run(self, *, once: bool = False, until_idle_seconds: float | None = None) -> None:
        """Work until stopped; with `once` until one job is done; with `until_idle_seconds` until there was none for as
        long."""
        self._introduce()
        patience = Patience(self._settings.engine_start_seconds, self._settings.engine_silence_seconds)
        with tempfile.TemporaryDirectory(prefix="foreshock-worker-") as folder:
            pool = EnginePool(Path(folder), patience)
            try:
                idle_since = time.monotonic()
                while not self._stopping():
                    lease = self._take(idle_since, until_idle_seconds)
                    if lease is not None:
                        self._do(lease, pool, Path(folder))
                        idle_since = time.monotonic()
                        if once:
                            break
                    elif until_idle_seconds is not None and time.monotonic() - idle_since >= until_idle_seconds:
                        self._console.say(f"no job for {until_idle_seconds:g} s: leaving")
                        break
            finally:
                pool.close()
                self._client.close()
        if self._stop_reason is not None:
            self._console.say(f"stopped ({self._stop_reason})")

    def _take(self, idle_since: float, until_idle_seconds: float | None) -> Lease | None:
        """The next job, None where there is none for now. A service that is away is waited for, for ever if need be."""
        wait = self._settings.lease_wait_seconds
        if until_idle_seconds is not None:
            wait = max(0.0, min(wait, idle_since + until_idle_seconds - time.monotonic()))
        self._waiting_for_a_job = True
        try:
            if self._stopping():
                return None
            lease = self._client.take(
                self._settings.worker_name, self._accelerator, device_name(self._accelerator), self._scorers, wait
            )
            self._backoff.reset()
            return lease
        except ServiceError as error:
            self._waiting_for_a_job = False
            if not self._stopping():
                delay = self._backoff.next_delay(error.retry_after_seconds)
                self._console.say(f"{error}; next attempt in {delay:.1f} s")
                sleep_until_stopped(self._stopping)(delay)
            return None
        finally:
            self._waiting_for_a_job = False

    def _interrupt(self) -> None:
        # More than once: the connection may only just be on its way up when the wish to stop comes.
        while self._waiting_for_a_job:
            self._client.interrupt()
            time.sleep(0.1)

    def _do(self, lease: Lease, pool: EnginePool, folder: Path) -> None:
        """Do the leased job and tell the service how it ended, whatever happens."""
        job = lease.job
        names = ", ".join(scorer_name(requested) for requested in job.scorers)
        self._console.say(f"job {job.id}: {names} on {job.rollouts.count} rollouts of step {job.step} of {job.run}")
        with Heartbeat(lease, self._connect) as heartbeat:

            def abandoned() -> bool:
                return heartbeat.lost or time.monotonic() > self._stop_at

            try:
                self._score(lease, pool, folder, abandoned)
                self._reach(lambda: self._client.complete(lease), abandoned)
                self._console.say(f"job {job.id}: done")
            except LeaseLostError:
                self._console.say(f"job {job.id}: dropped, its lease is lost")
            except Exception as error:
                if heartbeat.lost:
                    self._console.say(f"job {job.id}: dropped, its lease is lost")
                    return
                kind, reason = self._failure(error)
                self._fail(lease, kind, reason)

    def _score(self, lease: Lease, pool: EnginePool, folder: Path, abandoned: Callable[[], bool]) -> None:
        """Have each scorer of the job run, and upload what it gives. Scores count once the job is complete."""
        job = lease.job
        weights = self._library.find(_announced(job.checkpoint))
        rollouts, scores = folder / "rollouts.parquet", folder / "scores.parquet"
        rollouts.write_bytes(self._reach(lambda: self._client.rollouts(lease), abandoned))
        for requested in job.scorers:
            scores.unlink(missing_ok=True)
            command = self._command(lease, requested, weights, rollouts, scores)
            with self._console.progress(scorer_name(requested), job.rollouts.tokens) as report:
                seconds = pool.score(command, report, abandoned)
            weights.check_unchanged()
            data = scores.read_bytes()
            self._reach(partial(self._client.upload_scores, lease, requested, data), abandoned)
            self._console.say(
                f"job {job.id}: {scorer_name(requested)}: {job.rollouts.tokens} tokens in {seconds:.1f} s"
            )

    def _command(
        self, lease: Lease, requested: RequestedScorer, weights: Weights, rollouts: Path, scores: Path
    ) -> ScoreCommand:
        return ScoreCommand(
            number=0,
            scorer=requested.scorer,
            variant=requested.variant,
            weights_folder=str(weights.folder),
            weights_digest=weights.digest,
            weights_version=weights.version,
            options=lease.job.options.get(requested.scorer, {}),
            accelerator=self._accelerator,
            rollouts=str(rollouts),
            scores=str(scores),
        )

    def _failure(self, error: Exception) -> tuple[FailKind, str]:
        """How a job that ended in `error` failed: the kind and the reason that the service keeps."""
        if isinstance(error, JobAbandonedError) or self._stopping():
            return "retry", f"the worker was stopped ({self._stop_reason}) before the job was done"
        if isinstance(error, WeightsGoneError):
            return "skipped", str(error)
        if isinstance(error, UnknownRootError):
            return "retry", str(error)
        if isinstance(error, EngineError):
            return error.kind, error.reason
        if isinstance(error, ServiceError):
            kind: FailKind = "retry" if isinstance(error, ServiceUnavailable) else "final"
            return kind, f"the service did not take the scores: {error}"
        if isinstance(error, ForeshockError):
            return "final", str(error)
        self._console.say(traceback.format_exc())
        return "retry", f"the worker failed with {type(error).__name__}: {error}"

    def _fail(self, lease: Lease, kind: FailKind, reason: str) -> None:
        self._console.say(f"job {lease.job.id}: {_WORDS[kind]}: {reason}")
        try:
            # Short: where the service is away for longer, the lease runs out and says the same without the reason.
            self._reach(lambda: self._client.fail(lease, reason, kind), lambda: False, patience_seconds=30.0)
        except ServiceError as error:
            self._console.say(f"job {lease.job.id}: the service did not hear of it: {error}")

    def _reach(self, call: Callable[[], T], stop: Callable[[], bool], patience_seconds: float = 600.0) -> T:
        return retry(
            call,
            Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS),
            is_retryable=lambda error: isinstance(error, ServiceUnavailable) and not stop(),
            wait=sleep_until_stopped(stop),
            deadline_seconds=patience_seconds,
            on_retry=lambda error, delay: self._console.say(f"{error}; next attempt in {delay:.1f} s"),
        )

    def _connect(self) -> LeaseClient:
        key = self._settings.api_key
        return LeaseClient(self._settings.url, key.get_secret_value() if key else None)

    def _stopping(self) -> bool:
        return self._stop_reason is not None

    def _introduce(self) -> None:
        for name, value in self._settings.shown().items():
            self._console.say(f"{name}: {value}")
        self._console.say(
            f"offers {', '.join(self._scorers)} on {self._accelerator} ({device_name(self._accelerator)})"
        )
        if not self._settings.weights_roots:
            self._console.say(
                "no weights root is configured, so no checkpoint will be found: set "
                "FORESHOCK_WEIGHTS_ROOTS='name=/folder/of/checkpoints'"
            )


def scorer_name(requested: RequestedScorer) -> str:
    """The scorer and its variant, as a person reads it."""
    return f"{requested.scorer} ({requested.variant})" if requested.variant else requested.scorer


def _offered(wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    available = installed_scorers()
    if wanted is None:
        if not available:
            raise ConfigurationError(
                "no engine is installed: pip install 'foreshock[probes]' (torch), and vLLM beside it"
            )
        return available
    for name in wanted:
        try:
            engine = scorer_named(name).engine
        except UnsupportedScoreError as error:
            raise ConfigurationError(str(error)) from error
        if name not in available:
            raise ConfigurationError(f"{name} needs {engine}, which is not installed")
    return wanted


def _announced(checkpoint: Checkpoint) -> AnnouncedCheckpoint:
    return AnnouncedCheckpoint(**checkpoint.model_dump())
