"""One leased job: run its scorers in their engines and upload the results; classify its failure."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from foreshock.api.leases import LeasedJobRecord, LeaseRecord
from foreshock.api.probes import ScorerRecord
from foreshock.errors import ForeshockError, ServiceError, ServiceUnavailable
from foreshock.probe_kinds import EXACT, PROBE_KINDS
from foreshock.retry import Backoff, retry, sleep_until_stopped
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import EngineError, EnginePool, JobAbandonedError
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.offers import Offers, imported
from foreshock_probes.service_client import FailKind, LeaseClient
from foreshock_probes.weights import UnknownRootError, Weights, WeightsGoneError, WeightsLibrary

T = TypeVar("T")

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0
EXACT_PART = "foreshock_probes.exact_divergence.pairs:run_part"


class LeasedJob:
    """A leased job, with everything that a kind of probe needs to do it. Results take effect when it is completed.

    `folder` holds its files. While the job waits it calls `abandoned`; if that returns True, it raises
    JobAbandonedError.
    """

    def __init__(
        self,
        lease: LeaseRecord,
        client: LeaseClient,
        offers: Offers,
        library: WeightsLibrary,
        pool: EnginePool,
        folder: Path,
        console: WorkerConsole,
        abandoned: Callable[[], bool],
    ) -> None:
        self.job: LeasedJobRecord = lease.job
        self.library, self.folder, self.client = library, folder, client
        self.rollouts_file, self.result_file = folder / "rollouts.parquet", folder / "scores.parquet"
        self.doing_file = folder / "doing.txt"
        self._lease, self._pool, self._console, self._abandoned = lease, pool, console, abandoned
        self._accelerator = offers.accelerator
        named = lease.job.environment
        self._environment: EngineEnvironment = offers.environments[named] if named is not None else AS_IT_IS

    def run(self) -> None:
        """Do the job as its kind of probe requires, and upload its results."""
        self.doing_file.unlink(missing_ok=True)
        self.weights: Weights = self.library.find(self.job.checkpoint, self.job.project)
        self.rollouts_file.write_bytes(self.call(lambda: self.client.rollouts(self._lease)))
        kind = PROBE_KINDS.get(self.job.kind, EXACT)
        document = imported(kind.job)(self)
        self.weights.check_unchanged()
        if document is not None:
            self.call(lambda: self.client.upload_document(self._lease, kind.document, document))

    def score(self, requested: ScorerRecord) -> bytes:
        """Run a scorer, upload its scores and return them."""
        self.result_file.unlink(missing_ok=True)
        seconds = self.run_engine(self.command(requested), requested.name)
        self.weights.check_unchanged()
        data = self.result_file.read_bytes()
        self.call(partial(self.client.upload_scores, self._lease, requested, data))
        self.log_done(requested.name, seconds)
        return data

    def compare_exactly(self, key: str) -> None:
        """Run the two scorers of an exact pair and upload the divergences of their distributions."""
        self.result_file.unlink(missing_ok=True)
        pair, states, seconds = EXACT_PAIRS[key], self.folder / "states.safetensors", 0.0
        arguments = {"pair": key, "states": str(states)}
        try:
            for scorer in (pair.target, pair.behaviour):
                command = self.command(ScorerRecord(scorer=scorer), EXACT_PART, **arguments)
                seconds += self.run_engine(command, f"{pair.name}: {scorer}")
        finally:
            states.unlink(missing_ok=True)  # it holds the head and all states
        self.weights.check_unchanged()
        self.call(partial(self.client.upload_exact, self._lease, key, self.result_file.read_bytes()))
        self.log_done(pair.name, seconds)

    def command(self, requested: ScorerRecord, task: str | None = None, **arguments: str) -> ScoreCommand:
        """Return the command to run a scorer with the job's weights; `task` and its arguments as in ScoreCommand."""
        return ScoreCommand(
            scorer=requested.scorer,
            variant=requested.variant,
            weights_folder=str(self.weights.folder),
            weights_digest=self.weights.digest,
            weights_version=self.weights.version,
            options=dict(self.job.options.get(requested.scorer, {})),
            accelerator=self._accelerator,
            rollouts=str(self.rollouts_file),
            scores=str(self.result_file),
            task=task,
            arguments=arguments,
        )

    def run_engine(self, command: ScoreCommand, label: str | None) -> float:
        """Run a command and return its seconds in the engine; `label` names its progress bar, None: no bar."""
        if label is None:
            return self._pool.score(command, lambda tokens: None, self._abandoned, self._environment)
        with self._console.progress(label, self.job.rollouts.tokens) as report:
            return self._pool.score(command, report, self._abandoned, self._environment)

    def doing(self) -> str:
        """Return the job's current experiment, which its engine writes to `doing_file`; empty without such a file."""
        try:
            return self.doing_file.read_text("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def rollouts(self) -> RolloutBatch:
        """Return the job's rollouts."""
        return decode_rollouts(self.rollouts_file.read_bytes())

    def call(self, call: Callable[[], T]) -> T:
        """Return the service's answer to `call`, retried while it is unavailable."""
        return call_service(call, self._abandoned, self._console)

    def log(self, text: str) -> None:
        """Write a line of the job to the console."""
        self._console.log(f"job {self.job.id}: {text}")

    def log_done(self, name: str, seconds: float) -> None:
        """Log that `name` has processed the job's tokens."""
        self.log(f"{name}: {self.job.rollouts.tokens} tokens in {seconds:.1f} s")


def score(job: LeasedJob) -> None:
    """Do a job of scorers and exact pairs."""
    for requested in job.job.scorers:
        job.score(requested)
    for key in job.job.exact_pairs:
        job.compare_exactly(key)


def call_service(
    call: Callable[[], T], stop: Callable[[], bool], console: WorkerConsole, deadline_seconds: float = 600.0
) -> T:
    """Return the answer to `call`, retried with backoff while the service is unavailable, until `stop` is true."""
    return retry(
        call,
        Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS),
        is_retryable=lambda error: isinstance(error, ServiceUnavailable) and not stop(),
        wait=sleep_until_stopped(stop),
        deadline_seconds=deadline_seconds,
        on_retry=lambda error, delay: console.log(f"{error}; retrying in {delay:.1f} s"),
    )


def failure_of(error: Exception, stop_reason: str | None, console: WorkerConsole) -> tuple[FailKind, str]:
    """Return the kind and the reason of a failure to report for `error`. `stop_reason`: why the worker was stopped."""
    if isinstance(error, JobAbandonedError) or stop_reason is not None:
        return "retry", f"the worker was stopped ({stop_reason}) before the job was complete"
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
    console.log(traceback.format_exc())
    return "retry", f"the worker failed with {type(error).__name__}: {error}"


def names_of_job(job: LeasedJobRecord) -> str:
    """Return the names of the job's scorers and exact pairs, for messages."""
    return ", ".join([*(each.name for each in job.scorers), *(EXACT_PAIRS[key].name for key in job.exact_pairs)])
