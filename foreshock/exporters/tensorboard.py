"""TensorBoard: event files, written without torch or TensorFlow.

TensorBoard reads one event file of a folder at a time, so the files are in a folder of their own: by default
`foreshock` below the trainer's, which TensorBoard shows as a run beside it.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from foreshock.exporters.exporter import PREFIX, ExportedRun, Exporter, StepValues

_VARIABLES = ("TENSORBOARD_DIR", "TENSORBOARD_LOGGING_DIR")
"""Read by verl and by transformers."""


class TensorBoardExporter(Exporter):
    """Writes to `directory`; None: `foreshock` below $TENSORBOARD_DIR, $TENSORBOARD_LOGGING_DIR or `runs`."""

    name: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboard"

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, measures: Sequence[str] | None = None
    ) -> None:
        super().__init__(measures=measures)
        above = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "runs")
        self.directory = Path(directory) if directory is not None else Path(above) / "foreshock"
        self._writer: Any = None

    def start(self, run: ExportedRun) -> None:
        """Open the event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self.directory))

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Write the step as plain scalars, which every reader of event files knows, and flush."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{PREFIX}{name}", simple_value=value) for name, value in step.values.items()]
        self._writer.add_event(Event(step=step.step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()
        return True

    def close(self, timeout_seconds: float) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
