"""The worker: lease a job, run its scorers in their engines, upload the scores, repeat.

Every failure is logged and handled in one of four ways: service unavailable (retry with backoff), lease lost (drop the
job), job not possible (fail it with the reason), worker stopped (finish within the grace time, else return the job).
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

from foreshock.environment import device_slug
from foreshock.errors import ConfigurationError, ForeshockError, ServiceError, ServiceUnavailable
from foreshock.hardware import accelerator_name, device_name, gpu_name
from foreshock.retry import Backoff, retry, sleep_until_stopped
from foreshock.scorers import EXACT_PAIRS
from foreshock.weights_search import CAPABILITY, PROBE_KIND
from probes.console import WorkerConsole
from probes.engines.environment import AS_IT_IS, EngineEnvironment, offered_environments
from probes.engines.pool import EnginePool
from probes.engines.process import EngineError, EngineTimeouts, JobAbandonedError
from probes.engines.protocol import ScoreCommand
from probes.heartbeat import Heartbeat
from probes.scorers.request import UnsupportedScoreError
from probes.scorers.table import installed_scorers, offered_pairs, scorer_named
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
from probes.weights_search.job import search_weights

__all__ = ["Worker"]

T = TypeVar("T")

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
_OUTCOMES = {"retry": "failed, will be retried", "final": "failed", "skipped": "skipped"}


class Worker:
    """One worker. `scorers`: offer only these; None: all whose engine is installed.

    `engines`: score in these and leave them running; None: in engines of its own, ended with each `run`.

    Raises ConfigurationError if a scorer is unknown or its engine is not installed.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        console: WorkerConsole,
        *,
        scorers: tuple[str, ...] | None = None,
        engines: EnginePool | None = None,
    ) -> None:
        self._settings = settings
        self._console = console
        self._scorers = _offered(scorers)
        self._exact_pairs = offered_pairs(self._scorers)
        self._engines = engines
        self._accelerator = accelerator_name(settings.accelerator)
        self._environments = _environments(self._accelerator)
        self._library = WeightsLibrary(settings.weights_roots)
        self._client = self._connect()
        self._stop_reason: str | None = None
        self._stop_at = math.inf
        self._is_waiting_for_job = False
        self._backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)

    def stop(self, reason: str) -> None:
        """Lease no further job and finish the current one within the grace time; a second call ends it immediately.

        Safe to call from a signal handler.
        """
        again = self._stop_reason is not None
        self._stop_reason = reason
        self._stop_at = time.monotonic() + (0.0 if again else self._settings.shutdown_grace_seconds)
        if self._is_waiting_for_job and not again:
            threading.Thread(target=self._interrupt, daemon=True).start()

    def run(self, *, once: bool = False, until_idle_seconds: float | None = None) -> None:
        """Work until stopped, with `once` for one job, with `until_idle_seconds` until there was no job that long."""
        self._log_settings()
        timeouts = EngineTimeouts(self._settings.engine_start_seconds, self._settings.engine_silence_seconds)
        with tempfile.TemporaryDirectory(prefix="foreshock-worker-") as folder:
            pool = self._engines or EnginePool(Path(folder), timeouts)
            try:
                idle_since = time.monotonic()
                while not self._stopping():
                    lease = self._next_lease(idle_since, until_idle_seconds)
                    if lease is not None:
                        self._run_job(lease, pool, Path(folder))
                        idle_since = time.monotonic()
                        if once:
                            break
                    elif until_idle_seconds is not None and time.monotonic() - idle_since >= until_idle_seconds:
                        self._console.log(f"no job for {until_idle_seconds:g} s: exiting")
                        break
            finally:
                if self._engines is None:
                    pool.close()
                self._client.close()
        if self._stop_reason is not None:
            self._console.log(f"stopped ({self._stop_reason})")

    def _next_lease(self, idle_since: float, until_idle_seconds: float | None) -> Lease | None:
        """Return a lease on the next job, None if there is none now. Retries without limit if the service is down."""
        wait = self._settings.lease_wait_seconds
        if until_idle_seconds is not None:
            wait = max(0.0, min(wait, idle_since + until_idle_seconds - time.monotonic()))
        self._is_waiting_for_job = True
        try:
            if self._stopping():
                return None
            lease = self._client.take(
                self._settings.worker_name,
                self._accelerator,
                device_name(self._accelerator),
                (*self._scorers, CAPABILITY),
                wait,
                tuple(self._environments),
                self._exact_pairs,
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
        # Repeated, because the connection may not be open yet at the first call.
        while self._is_waiting_for_job:
            self._client.interrupt()
            time.sleep(0.1)

    def _run_job(self, lease: Lease, pool: EnginePool, folder: Path) -> None:
        """Run the leased job and report its outcome to the service."""
        job = lease.job
        names = ", ".join([*map(scorer_name, job.scorers), *(EXACT_PAIRS[key].name for key in job.exact_pairs)])
        self._console.log(f"job {job.id}: {names} on {job.rollouts.count} rollouts of step {job.step} of {job.run}")
        with Heartbeat(lease, self._connect) as heartbeat:

            def abandoned() -> bool:
                return heartbeat.lost or time.monotonic() > self._stop_at

            try:
                self._score(lease, pool, folder, abandoned)
                self._call(lambda: self._client.complete(lease), abandoned)
                self._console.log(f"job {job.id}: done")
            except LeaseLostError:
                self._console.log(f"job {job.id}: dropped, lease lost")
            except Exception as error:
                if heartbeat.lost:
                    self._console.log(f"job {job.id}: dropped, lease lost")
                    return
                kind, reason = self._failure(error)
                self._fail(lease, kind, reason)

    def _score(self, lease: Lease, pool: EnginePool, folder: Path, abandoned: Callable[[], bool]) -> None:
        """Run each scorer of the job and upload its scores. They take effect when the job is complete."""
        job = lease.job
        environment = self._environments[job.environment] if job.environment is not None else AS_IT_IS
        weights = self._library.find(_announced(job.checkpoint, job.project))
        rollouts, scores = folder / "rollouts.parquet", folder / "scores.parquet"
        rollouts.write_bytes(self._call(lambda: self._client.rollouts(lease), abandoned))
        scored: dict[str, bytes] = {}
        for requested in job.scorers:
            scores.unlink(missing_ok=True)
            command = self._command(lease, requested, weights, rollouts, scores)
            with self._console.progress(scorer_name(requested), job.rollouts.tokens) as report:
                seconds = pool.score(command, report, abandoned, environment)
            weights.check_unchanged()
            data = scored[requested.variant] = scores.read_bytes()
            self._call(partial(self._client.upload_scores, lease, requested, data), abandoned)
            self._log_done(lease, scorer_name(requested), seconds)
        for key in job.exact_pairs:
            scores.unlink(missing_ok=True)
            pair, states, seconds = EXACT_PAIRS[key], folder / "states.safetensors", 0.0
            try:
                for scorer in (pair.target, pair.behaviour):
                    command = self._command(lease, RequestedScorer(scorer=scorer), weights, rollouts, scores)
                    command = command.model_copy(update={"pair": key, "states": str(states)})
                    with self._console.progress(f"{pair.name}: {scorer}", job.rollouts.tokens) as report:
                        seconds += pool.score(command, report, abandoned, environment)
            finally:
                states.unlink(missing_ok=True)  # as large as the head and all states
            weights.check_unchanged()
            self._call(partial(self._client.upload_exact, lease, key, scores.read_bytes()), abandoned)
            self._log_done(lease, pair.name, seconds)
        if job.kind == PROBE_KIND:
            plain = self._command(lease, RequestedScorer(scorer=job.scorers[0].scorer), weights, rollouts, scores)
            found = search_weights(
                job.step,
                weights,
                [_announced(each, job.project) for each in job.candidates],
                self._library,
                plain,
                scored,
                lambda command: pool.score(command, lambda tokens: None, abandoned, environment),
                lambda line: self._console.log(f"job {job.id}: {line}"),
            )
            weights.check_unchanged()
            self._call(lambda: self._client.upload_weights_search(lease, found.to_dict()), abandoned)

    def _log_done(self, lease: Lease, name: str, seconds: float) -> None:
        self._console.log(f"job {lease.job.id}: {name}: {lease.job.rollouts.tokens} tokens in {seconds:.1f} s")

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
        """Return the kind and the reason of a failure to report for `error`."""
        if isinstance(error, JobAbandonedError) or self._stopping():
            return "retry", f"the worker was stopped ({self._stop_reason}) before the job was complete"
        if isinstance(error, WeightsGoneError):
            return "skipped", str(error)
        if isinstance(error, UnknownRootError):
            return "retry", str(error)
        if isinstance(error, EngineError):
            return error.kind, error.reason
        if isinstance(error, ServiceError):
            kind: FailKind = "retry" if isinstance(error, ServiceUnavailable) else "final"
            return kind, f"the service rejected the scores: {error}"
        if isinstance(error, ForeshockError):
            return "final", str(error)
        self._console.log(traceback.format_exc())
        return "retry", f"the worker failed with {type(error).__name__}: {error}"

    def _fail(self, lease: Lease, kind: FailKind, reason: str) -> None:
        self._console.log(f"job {lease.job.id}: {_OUTCOMES[kind]}: {reason}")
        try:
            # A short deadline: without the report, the lease expires and the job is retried without a reason.
            self._call(lambda: self._client.fail(lease, reason, kind), lambda: False, deadline_seconds=30.0)
        except ServiceError as error:
            self._console.log(f"job {lease.job.id}: the failure could not be reported: {error}")

    def _call(self, call: Callable[[], T], stop: Callable[[], bool], deadline_seconds: float = 600.0) -> T:
        return retry(
            call,
            Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS),
            is_retryable=lambda error: isinstance(error, ServiceUnavailable) and not stop(),
            wait=sleep_until_stopped(stop),
            deadline_seconds=deadline_seconds,
            on_retry=lambda error, delay: self._console.log(f"{error}; retrying in {delay:.1f} s"),
        )

    def _connect(self) -> LeaseClient:
        key = self._settings.api_key
        return LeaseClient(self._settings.url, key.get_secret_value() if key else None)

    def _stopping(self) -> bool:
        return self._stop_reason is not None

    def _log_settings(self) -> None:
        for name, value in self._settings.shown().items():
            self._console.log(f"{name}: {value}")
        offered = ", ".join([*self._scorers, *(EXACT_PAIRS[key].name for key in self._exact_pairs)])
        self._console.log(f"offering {offered} on {self._accelerator} ({device_name(self._accelerator)})")
        if not self._settings.weights_roots:
            self._console.log(
                "no weights root is configured, so no checkpoint can be loaded; set "
                "FORESHOCK_WEIGHTS_ROOTS='name=/folder/of/checkpoints,name@project=/folder'"
            )


def _environments(accelerator: str) -> dict[str, EngineEnvironment]:
    """Return the environments that this worker offers, by name: on a CPU, all that processes can be held to."""
    if accelerator == "cpu":
        return offered_environments()
    gpu = gpu_name()
    return {device_slug(gpu): AS_IT_IS} if gpu is not None else {}


def scorer_name(requested: RequestedScorer) -> str:
    """Return the scorer's name with its variant, for messages."""
    return f"{requested.scorer} ({requested.variant})" if requested.variant else requested.scorer


def _offered(requested: tuple[str, ...] | None) -> tuple[str, ...]:
    available = installed_scorers()
    if requested is None:
        if not available:
            raise ConfigurationError(
                "no engine is installed; run pip install 'foreshock[probes]' for torch, and install vLLM"
            )
        return available
    for name in requested:
        try:
            engine = scorer_named(name).engine
        except UnsupportedScoreError as error:
            raise ConfigurationError(str(error)) from error
        if name not in available:
            raise ConfigurationError(f"the scorer {name} needs {engine}, which is not installed")
    return requested


def _announced(checkpoint: Checkpoint, project: str) -> AnnouncedCheckpoint:
    return AnnouncedCheckpoint(**checkpoint.model_dump(), project=project)
