"""Shared parts of the cases: one real service, runs logged to it, and workers that replay them.

    def stale_head(bench: Bench) -> Outcome:
        run = bench.log_run("stale-head", {60: rollouts}, checkpoints={60: folder})
        bench.probe(run, 60, ("vllm.prefill", "torch.trainer"))
        return bench.shown(run, 60)

Nothing is started before a case needs it. `bench.once` makes values that several cases share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks.running_service import running_service, wait_until
from benchmarks.truth.case import Outcome, Sentence
from foreshock import Client
from foreshock.client.connection import ServiceConnection
from foreshock.client.reader import Reader
from foreshock.commands.queries import find_run, wait_for_attribution
from foreshock.digests import weights_digest
from foreshock.errors import Rejected
from foreshock.probe_kinds import DOCTOR
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock.rollouts.parquet import decode_scores
from foreshock.rollouts.scores import ScoreBatch
from foreshock.scorers import default_scorers, split_score_name
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import run_tasks
from foreshock_probes.scorers.request import ScoreTask
from foreshock_probes.settings import WorkerSettings
from foreshock_probes.worker import Worker

T = TypeVar("T")

WEIGHTS_ROOT = "bench"
_PATIENCE_SECONDS = 600.0


class RefusedError(Exception):
    """The client refused rollouts; the message is the one that it logged for its user."""


class Bench:
    """One service and its workers for all cases of a run of the benchmark. `folder` is temporary."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._made: dict[str, Any] = {}

    @cached_property
    def url(self) -> str:
        """The address of the service; the first use starts it."""
        folder = self.folder / "service"
        folder.mkdir(exist_ok=True)
        # numpy's pass gives the same numbers without compilation.
        return self._stack.enter_context(running_service(folder, FORESHOCK_TOKEN_PASS="numpy"))

    @cached_property
    def reader(self) -> Reader:
        """A reader of the service."""
        return self._stack.enter_context(Reader(self.url, timeout_seconds=120.0))

    @property
    def connection(self) -> ServiceConnection:
        """Requests to the service."""
        return self.reader.connection

    @property
    def weights_root(self) -> Path:
        """The folder of the weights root `WEIGHTS_ROOT`, in the workers' settings."""
        return self.folder / "weights"

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Return `make()`; for a `key` that was used before, return the first result."""
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])

    def log_run(
        self,
        key: str,
        steps: Mapping[int, RolloutBatch],
        *,
        scalars: Mapping[int, Mapping[str, float]] | None = None,
        checkpoints: Mapping[int, Path] | None = None,
        **description: Any,
    ) -> str:
        """Log a run as a trainer does, through `foreshock.Client`, and return its id; all steps are closed.

        `checkpoints` are folders of weights by the step that they sampled and scored; they are copied below
        `weights_root`. `description` has arguments of `Client.start_run` (`model_kind`, `fingerprint`, …).

        Raises RefusedError if the client refuses rollouts as invalid.
        """
        spool = self.folder / "spool" / key
        with (
            _logged_by_client() as messages,
            Client(self.url, run_key=key, spool_directory=spool, strict=True, block_when_full=True) as client,
        ):
            client.start_run(name=key, **description)
            for step in sorted({*steps, *(checkpoints or {})}):
                if checkpoints and step in checkpoints:
                    self._announce(client, key, step, checkpoints[step])
                if scalars and step in scalars:
                    client.log_scalars(step, scalars[step])
                if step in steps:
                    client.log_rollouts(step, steps[step])
            delivered = client.flush(_PATIENCE_SECONDS)
            if client.counters.invalid:
                raise RefusedError("; ".join(messages))
            if not delivered or client.counters.rejected or client.counters.dropped:
                raise RuntimeError(f"the service did not accept the run {key}: {client.counters!r}")
            run = client.run_id
        assert run is not None
        linted = f"/v1/runs/{run}/lint"
        if not wait_until(lambda: self.connection.get_json(linted)["checked_steps"] >= len(steps), _PATIENCE_SECONDS):
            raise RuntimeError(f"the service did not close the steps of run {run} in time")
        return run

    def probe(
        self,
        run: str,
        step: int,
        scorers: Sequence[str] = (),
        *,
        options: Mapping[str, Any] | None = None,
        environment: EngineEnvironment | str = AS_IT_IS,
        **request: Any,
    ) -> dict[str, Any]:
        """Request a probe, do its jobs by a worker held to `environment`, and wait for the attribution.

        If `environment` is a name, the request requires it, as `foreshock probe --environment` does. A scorer is
        written `name` or `name@variant`; without scorers, the defaults are used. `request` has further fields of
        `POST …/probes`. Return the probe. Raises RuntimeError with the worker's log if a job is not done.
        """
        named = [dict(zip(("scorer", "variant"), split_score_name(each), strict=True)) for each in scorers]
        named = named or [{"scorer": name, "variant": ""} for name in default_scorers()]
        body = {"step": step, "scorers": named, "kind": "exact", "options": dict(options or {}), **request}
        if isinstance(environment, str):
            body["environment"] = environment
        answer = self.connection.request("POST", f"/v1/runs/{run}/probes", json_body=body)
        said = self.work(AS_IT_IS if isinstance(environment, str) else environment)
        probe: dict[str, Any] = self.connection.get_json(f"/v1/probes/{answer.json()['id']}")
        if probe["state"] != "done":
            raise RuntimeError(f"the probe of step {step} is {probe['state']}: {probe.get('reason')}\n{said}")
        if probe["kind"] != DOCTOR.name:
            wait_for_attribution(self.reader, run, step)
        return probe

    def score(
        self,
        scorer: str,
        batch: RolloutBatch,
        weights: Path,
        options: Mapping[str, Any] | None = None,
        environment: EngineEnvironment = AS_IT_IS,
    ) -> ScoreBatch:
        """Score the batch without the service, and return the score as a trainer or an engine would log it."""
        rollouts = self.folder / "scored.rollouts"
        rollouts.write_bytes(encode_rollouts(batch))
        task = ScoreTask(
            scorer,
            "",
            rollouts,
            weights,
            weights_digest(weights),
            options=options or {},
            result=self.folder / "scored.scores",
        )
        (scores,) = run_tasks(
            [task], lambda each: decode_scores(each.result.read_bytes()), self.folder, environment=environment
        ).results
        return scores

    def work(self, environment: EngineEnvironment = AS_IT_IS) -> str:
        """Do all queued jobs with one worker whose engines are held to `environment`; return its log."""
        roots = {WEIGHTS_ROOT: self.weights_root}
        settings = WorkerSettings(url=self.url, weights_roots=roots, accelerator="cpu", lease_wait_seconds=0.5)
        said = StringIO()
        with _variables(environment.variables()):
            Worker(settings, WorkerConsole(said)).run(until_idle_seconds=0.5)
        return said.getvalue()

    def shown(self, run: str, step: int | None = None) -> Outcome:
        """Return what the product shows over HTTP: the conclusions of `step`, the lint, and the diagnosis.

        `step` None: the lint of the newest step, and no attribution.
        """
        record = find_run(self.reader, run)
        sentences: list[Sentence] = []
        if step is not None:
            attribution = self._optional(f"/v1/runs/{run}/steps/{step}/attribution") or {}
            sentences += [Sentence.of_conclusion(each) for each in attribution.get("conclusions") or ()]
            examined = self._optional(f"/v1/runs/{run}/steps/{step}/doctor") or {"report": {"findings": ()}}
            sentences += [Sentence.of_finding(each) for each in examined["report"]["findings"]]
        linted = record.last_step if step is None else step
        lint = self._optional(f"/v1/runs/{run}/steps/{linted}/lint") or {}
        sentences += [Sentence.of_lint(each) for each in lint.get("warnings") or ()]
        over_run = self.connection.get_json(f"/v1/runs/{run}/lint")
        seen = {sentence.kind for sentence in sentences}
        together = [*over_run["window"], *([over_run["whole_run"]] if over_run["whole_run"] else [])]
        sentences += [Sentence.of_lint(each) for each in together if each["name"] not in seen]
        found = self.reader.diagnosis(run)
        sentences.append(Sentence("diagnosis", found.headline, names_cause=False))
        return Outcome(tuple(sentences), found.verdict)

    def _announce(self, client: Client, key: str, step: int, weights: Path) -> None:
        path = f"{key}/step_{step:04d}"
        shutil.copytree(weights, self.weights_root / path, dirs_exist_ok=True)
        folder = self.weights_root / path
        client.log_checkpoint(step, root=WEIGHTS_ROOT, path=path, local_folder=folder, weights_version=step)

    def _optional(self, path: str) -> Any:
        try:
            return self.connection.get_json(path)
        except Rejected as error:
            if error.status == 404:
                return None
            raise


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which engines inherit, within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _logged_by_client() -> Iterator[list[str]]:
    """Yield a list that receives the client's warnings; they are not printed."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("foreshock.client")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


@contextlib.contextmanager
def open_bench() -> Iterator[Bench]:
    """Yield a bench; everything that it has started ends with the block."""
    with tempfile.TemporaryDirectory(prefix="foreshock-truth-") as folder, ExitStack() as stack:
        yield Bench(Path(folder), stack)
