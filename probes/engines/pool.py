"""The engine processes of a worker, kept warm from job to job for as long as nothing that matters changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from probes.engines.environment import AS_IT_IS, EngineEnvironment
from probes.engines.process import EngineError, EngineProcess, JobAbandonedError, Patience
from probes.engines.protocol import ScoreCommand
from probes.scorers.request import Report
from probes.scorers.table import scorer_named

__all__ = ["EnginePool"]


class EnginePool:
    """One process an engine. For a command in another environment it is replaced, as it can be held only once.

    On a GPU only one process is kept: each may claim its memory.
    """

    def __init__(self, folder: Path, patience: Patience | None = None) -> None:
        self._folder = folder
        self._patience = patience or Patience()
        self._processes: dict[str, tuple[EngineEnvironment, EngineProcess]] = {}

    def score(
        self,
        command: ScoreCommand,
        report: Report,
        abandoned: Callable[[], bool] = lambda: False,
        environment: EngineEnvironment = AS_IT_IS,
    ) -> float:
        """Have `command` done by its engine, held to `environment`; the seconds it took there.

        Where a process that was kept from an earlier job dies, the command is tried once more in a new one. Raises
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
                self.close(engine)  # after an unexpected failure nothing in that process can be trusted
            if error.gone and process is kept:
                # It may have died while it waited for work, which is not this command's fault.
                return self.score(command, report, abandoned, environment)
            raise
        except JobAbandonedError:
            self._processes.pop(engine, None)
            raise

    def process_ids(self) -> dict[str, int]:
        """Return the process that holds the model of each engine that is kept."""
        return {engine: process.model_pid for engine, (_, process) in self._processes.items()}

    def close(self, engine: str | None = None) -> None:
        """End the process of `engine`, or all."""
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
            warm = EngineProcess(engine, self._folder, self._patience, environment)
            self._processes[engine] = environment, warm
        return warm
