"""The worker's side of engine processes: start one, send it commands, keep it warm, end it with its children."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from foreshock.errors import ForeshockError
from foreshock_probes.child_process import ChildEndedError, ChildProcess
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.protocol import (
    Failed,
    Progress,
    Ready,
    Reply,
    ScoreCommand,
    Scored,
    model_key,
    parse_reply,
)
from foreshock_probes.offers import engine_of
from foreshock_probes.scorers.request import Report

Answer = TypeVar("Answer", Ready, Scored)
ErrorKind = Literal["retry", "final"]

_POLL_SECONDS = 0.2
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


class EngineError(ForeshockError):
    """An engine gave no scores. `kind`: "final" if a retry would fail too, else "retry". `gone`: its process ended."""

    def __init__(self, reason: str, kind: ErrorKind, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.gone = gone


class NotReloadedError(ForeshockError):
    """A running engine could not load other weights in place, or could not be shown to hold them."""


class JobAbandonedError(ForeshockError):
    """The job was abandoned (lease lost or worker stopped) while an engine worked on it."""


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Timeouts in seconds: `start` until the process is ready, `silence` between two messages of a command.

    An engine sends no message while it loads a model, so `silence` must exceed that time.
    """

    start_seconds: float = 120.0
    silence_seconds: float = 1800.0


class EngineProcess:
    """A running engine. Its output goes to a log file in `folder`. Not thread-safe: one command at a time.

    Raises EnvironmentUnavailableError if this machine cannot be held to `environment`.
    """

    def __init__(
        self,
        engine: str,
        folder: Path,
        timeouts: EngineTimeouts | None = None,
        environment: EngineEnvironment = AS_IT_IS,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._report_line = log
        self._not_reloadable: set[str] = set()
        variables = process_variables(environment)
        self.engine = engine
        self._timeouts = timeouts or EngineTimeouts()
        log_file = folder / f"{engine}-{time.monotonic_ns()}.log"
        self._child = ChildProcess("foreshock_probes.engines.serving", [engine], variables, log_file)
        self.model_pid = self._child.pid
        """Id of the process that holds the model; it differs from `pid` if each model has a process of its own."""
        self._listens = False

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._child.pid

    def alive(self) -> bool:
        """Return True if the process runs."""
        return self._child.alive()

    def score(self, command: ScoreCommand, report: Report, abandoned: Callable[[], bool] = lambda: False) -> float:
        """Run the command and return the seconds that it took in the engine.

        If the engine cannot load the weights in place, it is started again with them; later commands for this model
        start it again at once.

        `report` is called with the number of response tokens done, `abandoned` every 0.2 s. Raises EngineError if there
        are no scores; if `abandoned` returns True, ends the process and raises JobAbandonedError.
        """
        if not self._listens:
            self._wait_for(Ready, self._timeouts.start_seconds, report, abandoned)
            self._listens = True
        model = model_key(command)
        if model not in self._not_reloadable:
            try:
                return self._run(command, report, abandoned)
            except NotReloadedError as error:
                self._report_line(f"{self.engine} is started again for other weights: {error}")
                self._not_reloadable.add(model)
        return self._run(command.model_copy(update={"fresh": True}), report, abandoned)

    def _run(self, command: ScoreCommand, report: Report, abandoned: Callable[[], bool]) -> float:
        try:
            self._child.send(command.encoded())
        except ChildEndedError as error:
            raise self._crash(error) from error
        scored = self._wait_for(Scored, self._timeouts.silence_seconds, report, abandoned)
        self.model_pid = scored.pid
        return scored.seconds

    def close(self) -> None:
        """End the process and its children: wait up to 5 s for its exit, then kill them."""
        self._child.close()

    def _wait_for(
        self, expected: type[Answer], silence_seconds: float, report: Report, abandoned: Callable[[], bool]
    ) -> Answer:
        """Return the next reply of the type `expected`; report progress until then."""
        last_reply = time.monotonic()
        while True:
            if abandoned():
                self._child.kill()
                raise JobAbandonedError(f"{self.engine} was ended because its job was abandoned")
            reply = self._next_reply()
            if reply is None:
                if time.monotonic() - last_reply > silence_seconds:
                    tail = self._child.log_tail()
                    self._child.kill()
                    raise EngineError(
                        f"{self.engine} was ended: no message for {silence_seconds:g} s; the end of its log:\n{tail}",
                        "retry",
                        gone=True,
                    )
                continue
            last_reply = time.monotonic()
            if isinstance(reply, Progress):
                report(reply.tokens)
            elif isinstance(reply, Failed):
                if reply.failure == "reload":
                    raise NotReloadedError(reply.reason)
                raise EngineError(reply.reason, reply.failure)
            elif isinstance(reply, expected):
                return reply

    def _next_reply(self) -> Reply | None:
        """Return the next reply, None if there is none within 0.2 s. Raises EngineError if the process ended."""
        try:
            message = self._child.receive(_POLL_SECONDS)
        except ChildEndedError as error:
            raise self._crash(error) from error
        try:
            return None if message is None else parse_reply(message)
        except ValueError as error:
            raise EngineError(f"{self.engine} sent an invalid reply: {error}", "retry") from error

    def _crash(self, error: ChildEndedError) -> EngineError:
        return EngineError(f"the process of {self.engine} {error}", "retry", gone=True)


def process_variables(environment: EngineEnvironment = AS_IT_IS) -> dict[str, str]:
    """Return the environment variables of a process that runs an engine in `environment`.

    The default environment is that of this process.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
    own = EngineEnvironment.of_variables() if environment == AS_IT_IS else environment
    return {**_DEFAULT_ENVIRONMENT, **inherited, **_ENVIRONMENT, **own.variables()}


class EnginePool:
    """One process for each engine. A command in another environment replaces it: a process cannot change its own.

    On a GPU only one process is kept, because each may reserve the GPU's memory.
    """

    def __init__(
        self,
        folder: Path,
        timeouts: EngineTimeouts | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._log = log
        self._folder = folder
        self._timeouts = timeouts or EngineTimeouts()
        self._processes: dict[str, tuple[EngineEnvironment, EngineProcess]] = {}

    def score(
        self,
        command: ScoreCommand,
        report: Report,
        abandoned: Callable[[], bool] = lambda: False,
        environment: EngineEnvironment = AS_IT_IS,
    ) -> float:
        """Run `command` in its engine, held to `environment`; return the seconds that it took in the engine.

        If a process that was kept from an earlier job ends, the command is retried once in a new process. Raises
        EngineError, JobAbandonedError and UnsupportedScoreError as `EngineProcess.score` does, and
        EnvironmentUnavailableError if this machine cannot be held to `environment`.
        """
        engine = engine_of(command.scorer)
        _, kept = self._processes.get(engine, (environment, None))
        process = self._process(engine, environment, alone=command.accelerator != "cpu")
        try:
            return process.score(command, report, abandoned)
        except EngineError as error:
            if error.kind == "retry":
                self.close(engine)  # its state is unknown after an unexpected failure
            if error.gone and process is kept:
                # The process may have ended while it was idle, so this command need not be the cause.
                return self.score(command, report, abandoned, environment)
            raise
        except JobAbandonedError:
            self._processes.pop(engine, None)
            raise

    def process_ids(self) -> dict[str, int]:
        """Return, by engine, the id of the process that holds the model."""
        return {engine: process.model_pid for engine, (_, process) in self._processes.items()}

    def close(self, engine: str | None = None) -> None:
        """End the process of `engine`, or all processes if it is None."""
        for name in [engine] if engine else list(self._processes):
            _, process = self._processes.pop(name, (None, None))
            if process is not None:
                process.close()

    def _process(self, engine: str, environment: EngineEnvironment, *, alone: bool) -> EngineProcess:
        held_to, warm = self._processes.get(engine, (environment, None))
        if warm is not None and (held_to != environment or not warm.alive()):
            self.close(engine)
            warm = None
        if alone:
            for other in [name for name in self._processes if name != engine]:
                self.close(other)
        if warm is None:
            warm = EngineProcess(engine, self._folder, self._timeouts, environment, self._log)
            self._processes[engine] = environment, warm
        return warm
