"""trackio: metrics of the trainer's active run."""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from foreshock.exporters.exporter import PREFIX, ExportedRun, Exporter, StepValues


class TrackioExporter(Exporter):
    """Writes to `run` (of `trackio.init`), or to the active run of the thread that logs rollouts."""

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"

    def __init__(self, run: Any = None, *, measures: Sequence[str] | None = None) -> None:
        super().__init__(measures=measures)
        self._run = run

    def attach(self) -> None:
        """Take the active run: trackio shows it only to the thread that started it."""
        trackio = sys.modules.get("trackio")
        if self._run is None and trackio is not None:
            self._run = trackio.context_vars.current_run.get()

    @property
    def ready(self) -> bool:
        """True if there is a run."""
        return self._run is not None

    @property
    def missing(self) -> str:
        """The reason why the exporter is not ready."""
        return "the thread that logs rollouts has no active trackio run: call trackio.init(), or give run"

    def start(self, run: ExportedRun) -> None:
        """Do nothing: the run is open."""

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Add a row for the step; rows of one step are joined by trackio."""
        self._run.log({f"{PREFIX}{name}": value for name, value in step.values.items()}, step=step.step)
        return True

    def close(self, timeout_seconds: float) -> None:
        """Leave the run open: the trainer finishes it, and that sends the rows."""
