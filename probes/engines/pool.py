"""Engine processes of a worker, kept warm between jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import EngineError, EngineProcess, EngineTimeouts, JobAbandonedError
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.scorers.request import Report
from foreshock_probes.scorers.table import scorer_named


class EnginePool:
    """One process for each engine. A command in another environment replaces it: a process is held only once.

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
        engine = scorer_named(command.scorer).engine
        _, kept = self._processes.get(engine, (environment, None))
        process = self._process(engine, environment, alone=command.accelerator != "cpu")
        try:
            return process.score(command, report, abandoned)
        except EngineError as error:
            if error.kind == "retry":
                self.close(engine)  # its state is unknown after an unexpected failure
            if error.gone and process is kept:
                # It may have ended while it was idle, so this command need not be the cause.
                return self.score(command, report, abandoned, environment)
            raise
        except JobAbandonedError:
            self._processes.pop(engine, None)
            raise

    def process_ids(self) -> dict[str, int]:
        """Return the id of the process that holds the model, by engine."""
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
