"""The engine processes of a worker, kept warm from job to job for as long as nothing that matters changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreshock.digests import canonical_json
from foreshock.scorers import ENGINES
from probes.engines.process import EngineError, EngineProcess, JobAbandonedError, Patience
from probes.engines.protocol import ScoreCommand
from probes.scorers.request import Report
from probes.scorers.table import scorer_named

__all__ = ["EnginePool"]


class EnginePool:
    """One process an engine.

    An engine that can only reload weights in place (see `foreshock.scorers.Engine`) gets a new process whenever the
    weights or the options change. On a GPU only one process is kept: each may claim its memory.
    """

    def __init__(self, folder: Path, patience: Patience | None = None) -> None:
        self._folder = folder
        self._patience = patience or Patience()
        self._processes: dict[str, tuple[str, EngineProcess]] = {}

    def score(self, command: ScoreCommand, report: Report, abandoned: Callable[[], bool] = lambda: False) -> float:
        """Have `command` done by its engine; the seconds it took there.

        Where a process that was kept from an earlier job dies, the command is tried once more in a new one. Raises
        EngineError, JobAbandonedError and UnsupportedScoreError as `EngineProcess.score` does.
        """
        engine = ENGINES[scorer_named(command.scorer).engine]
        key = ""
        if engine.process_per_weights:
            key = canonical_json([command.weights_folder, command.weights_digest, command.options, command.accelerator])
        kept = self.process_ids().get(engine.name)
        process = self._process(engine.name, key, alone=command.accelerator != "cpu")
        try:
            return process.score(command, report, abandoned)
        except EngineError as error:
            if error.kind == "retry":
                self.close(engine.name)  # after an unexpected failure nothing in that process can be trusted
            if error.gone and process.pid == kept:
                # It may have died while it waited for work, which is not this command's fault.
                return self.score(command, report, abandoned)
            raise
        except JobAbandonedError:
            self._processes.pop(engine.name, None)
            raise

    def process_ids(self) -> dict[str, int]:
        """The process of each engine that is kept."""
        return {engine: process.pid for engine, (_, process) in self._processes.items()}

    def close(self, engine: str | None = None) -> None:
        """End the process of `engine`, or all."""
        for name in [engine] if engine else list(self._processes):
            _, process = self._processes.pop(name, ("", None))
            if process is not None:
                process.close()

    def _process(self, engine: str, key: str, *, alone: bool) -> EngineProcess:
        warm = self._processes.get(engine)
        if warm is not None and (warm[0] != key or not warm[1].alive()):
            self.close(engine)
            warm = None
        if alone:
            for other in [name for name in self._processes if name != engine]:
                self.close(other)
        if warm is None:
            warm = key, EngineProcess(engine, self._folder, self._patience)
            self._processes[engine] = warm
        return warm[1]
