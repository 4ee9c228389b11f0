"""Score in an engine's process: one process for a job's tasks, results as files, a time limit.

The worker writes the tasks to `job.json` in a folder of its own and runs `python -m foreshock_probes.score job.json`.
The process writes the result of each task to the file that the task names, its progress to `progress`, and at its end
`outcome.json`. Its output goes to a log; the error of a process that died, hung or wrote something else has the log's
last lines. A process has a process group of its own, which is killed with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from foreshock.digests import canonical_json
from foreshock.errors import ForeshockError
from foreshock.scorers import ENGINES
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.offers import engine_of
from foreshock_probes.scorers.request import Report, ScoreTask

T = TypeVar("T")
ErrorKind = Literal["retry", "final"]

JOB, OUTCOME, PROGRESS = "job.json", "outcome.json", "progress"
SILENCE_SECONDS = 1800.0
_POLL_SECONDS = 0.2
_LOG_TAIL_BYTES = 16_384
_LOG_TAIL_LINES = 12
# Engines do not need the API key.
_WITHHELD = ("FORESHOCK_API_KEY",)
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the engine's process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
_DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Both caches of oneDNN keep a kernel for each shape of a batch, by default 1,024 kernels. Rollouts have so many
    # lengths that memory would grow by 2 kB per scored token. A forward pass uses fewer than 32 kernels.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
}


TASKS: TypeAdapter[list[ScoreTask]] = TypeAdapter(list[ScoreTask])


class Outcome(BaseModel):
    """The seconds of each task that the process has finished, without the loading of its model.

    `failure`: why the next task gave no result: "final" if it would fail again, else "retry"; None: all are done.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: list[float]
    failure: ErrorKind | None = None
    reason: str = ""


class EngineError(ForeshockError):
    """An engine gave no result. `kind`: "final" if a retry would fail too, else "retry"."""

    def __init__(self, reason: str, kind: ErrorKind) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


class JobAbandonedError(ForeshockError):
    """The job was abandoned (lease lost or worker stopped) while an engine worked on it."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The result and the seconds of each task, and the seconds in which engines started and loaded models."""

    results: list[T]
    seconds: list[float]
    start_seconds: float


def run_tasks(
    tasks: Sequence[ScoreTask],
    read: Callable[[ScoreTask], T],
    folder: Path,
    *,
    environment: EngineEnvironment = AS_IT_IS,
    silence_seconds: float = SILENCE_SECONDS,
    report: Report = lambda tokens: None,
    abandoned: Callable[[], bool] = lambda: False,
) -> Done[T]:
    """Run the tasks in processes that use `folder`, and return what `read` returns for each of them.

    Consecutive tasks of one engine have one process. Two engines have one each, and so have two weights or options of
    an engine that keeps a GPU's memory until its process ends.

    `report` is called with the number of response tokens done, `abandoned` every 0.2 s. Raises EngineError if a process
    dies, shows no progress for `silence_seconds`, refuses a task, or leaves a result that cannot be read;
    JobAbandonedError if `abandoned` returns True; EnvironmentUnavailableError if this machine cannot be held to
    `environment`.
    """
    results: list[T] = []
    seconds: list[float] = []
    start, tokens = time.monotonic(), 0
    for (engine, _), group in itertools.groupby(tasks, key=_shared_by):
        part = list(group)
        with _process(engine, part, folder, environment) as process:
            tokens = process.wait(tokens, silence_seconds, report, abandoned)
            seconds += process.outcome().seconds
            for task in part:
                try:
                    results.append(read(task))
                except Exception as error:
                    problem = f"left no readable result of {task.scorer} ({type(error).__name__}: {error})"
                    raise process.error(problem) from error
    return Done(results, seconds, time.monotonic() - start - sum(seconds))


def _shared_by(task: ScoreTask) -> tuple[str, object]:
    """Return the engine of the task and what tasks must have in common to share its process."""
    engine = engine_of(task.scorer)
    own = (task.weights_digest, canonical_json(task.options)) if ENGINES[engine].keeps_memory else ()
    return engine, (task.ranks, *own)


def process_variables(environment: EngineEnvironment = AS_IT_IS) -> dict[str, str]:
    """Return the environment variables of a process that runs an engine in `environment`.

    The default environment is that of this process.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
    own = EngineEnvironment.of_variables() if environment == AS_IT_IS else environment
    return {**_DEFAULT_ENVIRONMENT, **inherited, **_ENVIRONMENT, **own.variables()}


@contextmanager
def _process(
    engine: str, tasks: Sequence[ScoreTask], folder: Path, environment: EngineEnvironment
) -> Iterator[_EngineProcess]:
    """Start a process for the tasks; it and its children are killed at the end of the context."""
    variables = process_variables(environment)
    for path in (folder / OUTCOME, folder / PROGRESS, *(task.result for task in tasks)):
        path.unlink(missing_ok=True)
    (folder / JOB).write_bytes(TASKS.dump_json(list(tasks)))
    log = folder / f"{engine}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "foreshock_probes.score", str(folder / JOB)],
            stdin=subprocess.PIPE,  # processes end themselves when the other end is closed, even by the worker's death
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    try:
        yield _EngineProcess(engine, started, folder, log)
    finally:
        # The group may outlive its leader: an engine may have workers of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


@dataclass(frozen=True, slots=True)
class _EngineProcess:
    """A running process and its files."""

    engine: str
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def wait(self, before: int, silence_seconds: float, report: Report, abandoned: Callable[[], bool]) -> int:
        """Wait for the end of the process and return the tokens done, with those of earlier processes (`before`)."""
        progress = self.folder / PROGRESS
        tokens, changed_ns, last_change = before, 0, time.monotonic()
        while self.process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_POLL_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                tokens = before + int(progress.read_text("ascii"))
                if progress.stat().st_mtime_ns != changed_ns:
                    changed_ns, last_change = progress.stat().st_mtime_ns, time.monotonic()
                    report(tokens)
            if self.process.returncode is None and abandoned():
                raise JobAbandonedError(f"{self.engine} was ended because its job was abandoned")
            if self.process.returncode is None and time.monotonic() - last_change > silence_seconds:
                raise self.error(f"was ended: no progress for {silence_seconds:g} s")
        if self.process.returncode != 0:
            raise self.error(_how_it_ended(self.process.returncode))
        return tokens

    def outcome(self) -> Outcome:
        """Return the outcome of the process that has ended. Raises EngineError if a task failed."""
        try:
            found = Outcome.model_validate_json((self.folder / OUTCOME).read_bytes())
        except (OSError, ValueError) as error:
            raise self.error(f"left no readable {OUTCOME} ({error})") from error
        if found.failure is not None:
            raise EngineError(found.reason, found.failure)
        return found

    def error(self, what: str) -> EngineError:
        """Return the error of a process that failed in an unexpected way, with the last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            lines = [line.rstrip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        tail = "\n".join(line[:400] for line in lines[-_LOG_TAIL_LINES:])
        return EngineError(f"the process of {self.engine} {what}; the end of its log:\n{tail}", "retry")


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    hint = " (signal 9 is often the system's out-of-memory killer)" if status == -signal.SIGKILL else ""
    return f"was ended by signal {-status}{hint}"
