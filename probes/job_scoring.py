"""One leased job: run its scorers in their engines and upload the scores, and the reason to report if that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from foreshock.errors import ForeshockError, ServiceError, ServiceUnavailable
from foreshock.layer_divergence import LAYERS_KIND
from foreshock.retry import Backoff, retry, sleep_until_stopped
from foreshock.rollouts import decode_rollouts
from foreshock.routing import ROUTING_KIND
from foreshock.scorers import EXACT_PAIRS, score_name
from foreshock.weights_search import PROBE_KIND
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.pool import EnginePool
from foreshock_probes.engines.process import EngineError, JobAbandonedError
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.layer_divergence.job import compare_layers
from foreshock_probes.offers import Offers
from foreshock_probes.routing.comparison import compare_routes
from foreshock_probes.routing.recorded import RecordedRoutes, read_routes
from foreshock_probes.service_client import Checkpoint, FailKind, Job, Lease, LeaseClient, RequestedScorer
from foreshock_probes.weights import (
    AnnouncedCheckpoint,
    UnknownRootError,
    Weights,
    WeightsGoneError,
    WeightsLibrary,
)
from foreshock_probes.weights_search.job import search_weights

__all__ = ["FIRST_RETRY_SECONDS", "LONGEST_RETRY_SECONDS", "JobScoring", "call_service", "failure_of", "names_of_job"]

T = TypeVar("T")

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0


class JobScoring:
    """The scoring of one leased job. Its scores take effect when the job is completed.

    `folder` holds its files; `abandoned` is asked while it waits, and ends it with JobAbandonedError.
    """

    def __init__(
        self,
        lease: Lease,
        client: LeaseClient,
        offers: Offers,
        library: WeightsLibrary,
        pool: EnginePool,
        folder: Path,
        console: WorkerConsole,
        abandoned: Callable[[], bool],
    ) -> None:
        self._lease = lease
        self._client = client
        self._accelerator = offers.accelerator
        self._library = library
        self._pool = pool
        self._folder = folder
        self._console = console
        self._abandoned = abandoned
        named = lease.job.environment
        self._environment: EngineEnvironment = offers.environments[named] if named is not None else AS_IT_IS
        self._rollouts, self._scores = folder / "rollouts.parquet", folder / "scores.parquet"

    def run(self) -> None:
        """Run each scorer of the job and upload its scores."""
        job = self._lease.job
        weights = self._library.find(_announced(job.checkpoint, job.project))
        self._rollouts.write_bytes(self._call(lambda: self._client.rollouts(self._lease)))
        if job.kind == LAYERS_KIND:
            self._compare_layers(weights)
            return
        if job.kind == ROUTING_KIND:
            self._compare_routes(weights)
            return
        scored = {requested.variant: self._score(requested, weights) for requested in job.scorers}
        for key in job.exact_pairs:
            self._compare_exactly(key, weights)
        if job.kind == PROBE_KIND:
            self._search_weights(weights, scored)

    def _score(self, requested: RequestedScorer, weights: Weights) -> bytes:
        self._scores.unlink(missing_ok=True)
        seconds = self._run_engine(self._command(requested, weights), scorer_name(requested))
        weights.check_unchanged()
        data = self._scores.read_bytes()
        self._call(partial(self._client.upload_scores, self._lease, requested, data))
        self._log_done(scorer_name(requested), seconds)
        return data

    def _compare_exactly(self, key: str, weights: Weights) -> None:
        self._scores.unlink(missing_ok=True)
        pair, states, seconds = EXACT_PAIRS[key], self._folder / "states.safetensors", 0.0
        try:
            for scorer in (pair.target, pair.behaviour):
                command = self._command(RequestedScorer(scorer=scorer), weights)
                command = command.model_copy(update={"pair": key, "states": str(states)})
                seconds += self._run_engine(command, f"{pair.name}: {scorer}")
        finally:
            states.unlink(missing_ok=True)  # as large as the head and all states
        weights.check_unchanged()
        self._call(partial(self._client.upload_exact, self._lease, key, self._scores.read_bytes()))
        self._log_done(pair.name, seconds)

    def _compare_layers(self, weights: Weights) -> None:
        job = self._lease.job
        compared, reference = (self._command(requested, weights) for requested in job.scorers)
        found = compare_layers(
            job.step,
            (compared, reference),
            self._folder / "states.npy",
            lambda command: self._run_engine(command, f"layers: {command.scorer}"),
        )
        weights.check_unchanged()
        self._call(lambda: self._client.upload_layers(self._lease, found.to_dict()))
        self._console.log(f"job {job.id}: {found.in_words()}")

    def _compare_routes(self, weights: Weights) -> None:
        job = self._lease.job
        target, behaviour = (self._record_routes(requested, weights) for requested in job.scorers)
        weights.check_unchanged()
        names = [score_name(each.scorer, each.variant) for each in job.scorers]
        rollouts = decode_rollouts(self._rollouts.read_bytes())
        found = compare_routes(rollouts, target, behaviour, (names[0], names[1]))
        self._call(lambda: self._client.upload_routing(self._lease, found.to_dict()))

    def _record_routes(self, requested: RequestedScorer, weights: Weights) -> RecordedRoutes:
        routes = self._folder / "routes.safetensors"
        command = self._command(requested, weights).model_copy(update={"routes": str(routes)})
        try:
            name = f"routes of {scorer_name(requested)}"
            self._log_done(name, self._run_engine(command, name))
            return read_routes(routes)
        finally:
            routes.unlink(missing_ok=True)  # larger than the scores by layers times experts per token

    def _search_weights(self, weights: Weights, scored: dict[str, bytes]) -> None:
        job = self._lease.job
        found = search_weights(
            job.step,
            weights,
            [_announced(each, job.project) for each in job.candidates],
            self._library,
            self._command(RequestedScorer(scorer=job.scorers[0].scorer), weights),
            scored,
            lambda command: self._pool.score(command, lambda tokens: None, self._abandoned, self._environment),
            lambda line: self._console.log(f"job {job.id}: {line}"),
        )
        weights.check_unchanged()
        self._call(lambda: self._client.upload_weights_search(self._lease, found.to_dict()))

    def _run_engine(self, command: ScoreCommand, label: str) -> float:
        with self._console.progress(label, self._lease.job.rollouts.tokens) as report:
            return self._pool.score(command, report, self._abandoned, self._environment)

    def _command(self, requested: RequestedScorer, weights: Weights) -> ScoreCommand:
        return ScoreCommand(
            number=0,
            scorer=requested.scorer,
            variant=requested.variant,
            weights_folder=str(weights.folder),
            weights_digest=weights.digest,
            weights_version=weights.version,
            options=self._lease.job.options.get(requested.scorer, {}),
            accelerator=self._accelerator,
            rollouts=str(self._rollouts),
            scores=str(self._scores),
        )

    def _call(self, call: Callable[[], T]) -> T:
        return call_service(call, self._abandoned, self._console)

    def _log_done(self, name: str, seconds: float) -> None:
        job = self._lease.job
        self._console.log(f"job {job.id}: {name}: {job.rollouts.tokens} tokens in {seconds:.1f} s")


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


def names_of_job(job: Job) -> str:
    """Return the names of the job's scorers and exact pairs, for messages."""
    return ", ".join([*map(scorer_name, job.scorers), *(EXACT_PAIRS[key].name for key in job.exact_pairs)])


def scorer_name(requested: RequestedScorer) -> str:
    """Return the scorer's name with its variant, for messages."""
    return f"{requested.scorer} ({requested.variant})" if requested.variant else requested.scorer


def _announced(checkpoint: Checkpoint, project: str) -> AnnouncedCheckpoint:
    return AnnouncedCheckpoint(**checkpoint.model_dump(), project=project)
