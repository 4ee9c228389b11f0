"""One leased job: run its scorers in an engine's process and upload the results; classify its failure."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from foreshock import vocabulary
from foreshock.api.leases import LeasedJobRecord, LeaseRecord
from foreshock.api.probes import ScorerRecord
from foreshock.api.records import to_json
from foreshock.errors import ForeshockError, Rejected, ServiceError, ServiceUnavailable, WeightsError
from foreshock.measures.exact import measure_exact
from foreshock.probe_kinds import EXACT, PROBE_KINDS
from foreshock.retry import Backoff, retry, sleep_until_stopped
from foreshock.rollouts import RolloutBatch, decode_rollouts, decode_scores
from foreshock.scorers import EXACT_PAIRS, score_name
from foreshock_probes.adapters import is_loaded_by
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.environment import AS_IT_IS
from foreshock_probes.engines.process import EngineError, JobAbandonedError, run_tasks
from foreshock_probes.offers import Offers, imported
from foreshock_probes.scorers.request import ScoreTask, read_arrays
from foreshock_probes.service_client import TRANSFER_SECONDS, FailKind, LeaseClient
from foreshock_probes.weights import UnknownRootError, Weights, WeightsGoneError, WeightsLibrary

T = TypeVar("T")

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0
_PARQUET = "application/vnd.apache.parquet"
_TEXTS_OF_A_PART = 4096
"""Fewer than 1 MiB of JSON, which a body may have."""
EXACT_PART = "foreshock_probes.exact_divergence.pairs:run_part"


@dataclass
class LeasedJob:
    """A leased job, with everything that a kind of probe needs to do it. Results take effect when it is completed.

    `folder` holds its files. While the job waits it calls `abandoned`; if that returns True, it raises
    JobAbandonedError.
    """

    lease: LeaseRecord
    client: LeaseClient
    offers: Offers
    library: WeightsLibrary
    folder: Path
    console: WorkerConsole
    abandoned: Callable[[], bool]
    silence_seconds: float

    def __post_init__(self) -> None:
        self.job: LeasedJobRecord = self.lease.job
        self.rollouts_file, self.doing_file = self.folder / "rollouts.parquet", self.folder / "doing.txt"

    def run(self) -> None:
        """Do the job as its kind of probe requires, and upload its results."""
        self.weights: Weights = self.library.find(self.job.checkpoint, self.job.project)
        self.rollouts_file.write_bytes(self.call("GET", "rollouts", timeout_seconds=TRANSFER_SECONDS).content)
        if self.job.wants_vocabulary:
            self._send_vocabulary()
        kind = PROBE_KINDS.get(self.job.kind, EXACT)
        document = imported(kind.job)(self)
        self.weights.check_unchanged()
        if document is not None:
            self.call("PUT", kind.name, json_body=document)

    def _send_vocabulary(self) -> None:
        """Send the texts of the tokens, if a tokenizer is beside the weights; without them the job is done the same."""
        file = self.weights.folder / vocabulary.FILE_NAME
        if not file.is_file():
            return
        try:
            texts = vocabulary.vocabulary_of(file)
            digest = vocabulary.digest_of_texts(texts)
            for first in range(0, len(texts), _TEXTS_OF_A_PART):
                part = texts[first : first + _TEXTS_OF_A_PART]
                body = {"digest": digest, "size": len(texts), "first": first, "texts": part}
                self.call("PUT", "vocabulary", json_body=body)
        except (WeightsError, Rejected) as error:
            self.log(f"the pages will show token ids, not texts: {error}")

    def task(
        self,
        requested: ScorerRecord,
        result: str,
        function: str | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> ScoreTask:
        """Return the task to run a scorer and write the file `result`; `function` and its arguments as in ScoreTask."""
        chosen = self.weights
        merges = chosen.adapter is not None and not is_loaded_by(requested.scorer, chosen.adapter)
        folder = chosen.folder
        if merges:
            folder = self.folder / f"merged-{chosen.digest[-16:]}"
            if not folder.exists():
                chosen.merge(folder)
        return ScoreTask(
            requested.scorer,
            requested.variant,
            self.rollouts_file,
            folder,
            chosen.digest,
            chosen.version,
            options=self.job.options.get(requested.scorer, {}),
            accelerator=self.offers.accelerator,
            adapter=None if merges else chosen.adapter,
            merged_adapter=merges,
            result=self.folder / result,
            function=function,
            arguments=arguments or {},
        )

    def run_tasks(self, tasks: Sequence[ScoreTask], read: Callable[[ScoreTask], T], name: str) -> list[T]:
        """Run the tasks and return what `read` returns for each of them; `name` is that of the whole in the log."""
        tokens, named = self.job.rollouts.tokens, self.job.environment
        with self.console.progress(name, tokens * len(tasks)) as report:
            done = run_tasks(
                tasks,
                read,
                self.folder,
                environment=AS_IT_IS if named is None else self.offers.environments[named],
                silence_seconds=self.silence_seconds,
                report=report,
                abandoned=self.abandoned,
            )
        self.weights.check_unchanged()
        for task, seconds in zip(tasks, done.seconds, strict=True):
            self.log(f"{name}: {score_name(task.scorer, task.variant)}: {tokens} tokens in {seconds:.1f} s")
        self.log(f"{name}: started and loaded in {done.start_seconds:.1f} s")
        return done.results

    def doing(self) -> str:
        """Return the job's current experiment, which its engine writes to `doing_file`; empty without such a file."""
        try:
            return self.doing_file.read_text("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def rollouts(self) -> RolloutBatch:
        """Return the job's rollouts."""
        return decode_rollouts(self.rollouts_file.read_bytes())

    def call(self, method: str, action: str, **options: Any) -> httpx.Response:
        """Return the service's answer to a request about the job's lease, retried while it is unavailable."""
        call = partial(self.client.on_lease, method, self.lease, action, **options)
        return call_service(call, self.abandoned, self.console)

    def log(self, text: str) -> None:
        """Write a line of the job to the console."""
        self.console.log(f"job {self.job.id}: {text}")


def score(job: LeasedJob) -> dict[str, Any] | None:
    """Do a job of scorers, and upload their scores; or one of an exact pair, and return its comparison."""
    tasks = [job.task(each, f"scores-{number}.parquet") for number, each in enumerate(job.job.scorers)]
    found = job.run_tasks(tasks, _checked_scores, "scores") if tasks else []
    for requested, data in zip(job.job.scorers, found, strict=True):
        query = {"scorer": requested.scorer, "variant": requested.variant}
        headers = {"Content-Type": _PARQUET}
        job.call("PUT", "scores", query=query, content=data, headers=headers, timeout_seconds=TRANSFER_SECONDS)
    return next((_compared(job, pair) for pair in job.job.exact_pairs), None)


def _checked_scores(task: ScoreTask) -> bytes:
    """Return a file of scores. Raises InvalidRolloutsError if it is not one."""
    data = task.result.read_bytes()
    decode_scores(data)
    return data


def _compared(job: LeasedJob, key: str) -> dict[str, Any]:
    """Return the exact divergences of a pair, measured; the values of the tokens stay on the worker."""
    pair, arguments = EXACT_PAIRS[key], {"pair": key, "states": str(job.folder / "states.safetensors")}
    tasks = [
        job.task(ScorerRecord(scorer=scorer), f"{side}.safetensors", EXACT_PART, arguments)
        for side, scorer in (("target", pair.target), ("behaviour", pair.behaviour))
    ]
    (_, target), (values, behaviour) = job.run_tasks(tasks, lambda task: read_arrays(task.result), pair.name)
    rollouts = job.rollouts()
    measures = measure_exact(values, rollouts.response_offsets, rollouts.generated, rollouts.group_ids)
    prints = {"target_fingerprint": target.to_dict(), "behaviour_fingerprint": behaviour.to_dict()}
    return {**to_json(measures), **prints, "pair": key}


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
