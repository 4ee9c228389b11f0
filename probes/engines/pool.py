"""The engine processes of a worker, kept warm from job to job for as long as nothing that matters changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreshock.digests import canonical_json
from foreshock.scorers import ENGINES
from probes.engines.environment import AS_IT_IS, EngineEnvironment
from probes.engines.process import EngineError, EngineProcess, JobAbandonedError, Patience
from probes.engines.protocol import ScoreCommand
from probes.scorers.request import Report
from probes.scorers.table import scorer_named

__all__ = ["EnginePool"]

_Place = tuple[str, EngineEnvironment]


class EnginePool:
    """One process for each engine and environment.

    An engine that can only reload weights in place (see `foreshock.scorers.Engine`) gets a new process whenever the
    weights or the options change. On a GPU only one process is kept: each may claim its memory.
    """

    def __init__(self, folder: Path, patience: Patience | None = None) -> None:
        self._folder = folder
        self._patience = patience or Patience()
        self._processes: dict[_Place, tuple[str, EngineProcess]] = {}

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
        engine = ENGINES[scorer_named(command.scorer).engine]
        key = ""
        if engine.process_per_weights:
            key = canonical_json([command.weights_folder, command.weights_digest, command.options, command.accelerator])
        place = engine.name, environment
        kept = self.process_ids(environment).get(engine.name)
        process = self._process(place, key, alone=command.accelerator != "cpu")
        try:
            return process.score(command, report, abandoned)
        except EngineError as error:
            if error.kind == "retry":
                self._close(place)  # after an unexpected failure nothing in that process can be trusted
            if error.gone and process.pid == kept:
                # It may have died while it waited for work, which is not this command's fault.
                return self.score(command, report, abandoned, environment)
            raise
        except JobAbandonedError:
            self._processes.pop(place, None)
            raise

    def process_ids(self, environment: EngineEnvironment = AS_IT_IS) -> dict[str, int]:
        """Return the process id of each engine that is kept in `environment`."""
        return {engine: process.pid for (engine, its), (_, process) in self._processes.items() if its == environment}

    def close(self) -> None:
        """End all processes."""
        for place in list(self._processes):
            self._close(place)

    def _close(self, place: _Place) -> None:
        _, process = self._processes.pop(place, ("", None))
        if process is not None:
            process.close()

    def _process(self, place: _Place, key: str, *, alone: bool) -> EngineProcess:
        warm = self._processes.get(place)
        if warm is not None and (warm[0] != key or not warm[1].alive()):
            self._close(place)
            warm = None
        if alone:
            for other in [each for each in self._processes if each != place]:
                self._close(other)
        if warm is None:
            engine, environment = place
            warm = key, EngineProcess(engine, self._folder, self._patience, environment)
            self._processes[place] = warm
        return warm[1]
