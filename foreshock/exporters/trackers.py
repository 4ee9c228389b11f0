"""The trackers that steps are written to: TensorBoard, W&B, MLflow and trackio."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from foreshock.clock import now_us
from foreshock.exporters.exporter import PREFIX, ExportedRun, Exporter, StepValues

_VARIABLES = ("TENSORBOARD_DIR", "TENSORBOARD_LOGGING_DIR")
"""Read by verl and by transformers."""


class TensorBoardExporter(Exporter):
    """Writes event files to `directory`; None: `foreshock` below $TENSORBOARD_DIR, $TENSORBOARD_LOGGING_DIR or `runs`.

    Neither torch nor TensorFlow is needed. TensorBoard reads one event file of a folder at a time, so the files are in
    a folder of their own: by default `foreshock` below the trainer's, which TensorBoard shows as a run beside it.
    """

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

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_SETTLE_SECONDS = 0.2
"""`run.step` changes once a log call of another thread begins a row: in microseconds, unless that thread is delayed."""


class _OfActiveRun(Exporter):
    """Writes to a run of the trainer's own tracker: one that is given, or the active one."""

    how: ClassVar[str]
    """Message if there is no run: what is missing, and what to do."""

    def __init__(self, run: Any = None, *, measures: Sequence[str] | None = None) -> None:
        super().__init__(measures=measures)
        self._run = run

    def _active(self, tracker: Any) -> Any:
        """Return the active run of the tracker's module, None if there is none."""
        raise NotImplementedError

    def attach(self) -> None:
        """Take the active run, which some trackers show only to the thread that started it."""
        tracker = sys.modules.get(self.module)
        if self._run is None and tracker is not None:
            self._run = self._active(tracker)

    @property
    def ready(self) -> bool:
        """True if there is a run."""
        return self._run is not None

    @property
    def missing(self) -> str:
        """The reason why the exporter is not ready."""
        return self.how

    def close(self) -> None:
        """Leave the run open: the trainer finishes it."""


class WandbExporter(_OfActiveRun):
    """Writes to `run`, or to the active run of this process (`wandb.run`): the series become part of the trainer's own.

    W&B has one counter of rows in a run and drops what is logged for an earlier row. A row of ours would advance the
    counter, and the trainer's `wandb.log(…, step=…)` of an older number would be dropped. Therefore a step joins the
    row that the trainer is writing (`commit=False`), one step per row, and the series have an axis of their own,
    `foreshock/step`: a late step is a later row with a smaller value on that axis.
    """

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    how = "there is no active W&B run in this process: call wandb.init(), or give WandbExporter(run=…)"
    _row: int | None = None

    @property
    def ready(self) -> bool:
        """True if there is an active run, which any thread sees."""
        self.attach()
        return self._run is not None

    def _active(self, tracker: Any) -> Any:
        return getattr(tracker, "run", None)

    def start(self, run: ExportedRun) -> None:
        """Define the axis of the series."""
        self._run.define_metric(f"{PREFIX}step", hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        self._run.summary[f"{PREFIX}page"] = run.page

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Add the step to the trainer's current row; False if that row has one already."""
        row = self._run.step
        if row == self._row and not closing:
            return False
        values = {f"{PREFIX}{name}": value for name, value in step.values.items()}
        own = {**values, f"{PREFIX}step": step.step}
        if closing and row == self._row:
            # End the row that has a step already.
            self._run.log({}, commit=True)
        self._run.log(own, commit=closing)
        if closing:
            self._row = None
        else:
            time.sleep(_SETTLE_SECONDS)
            self._row = max(row, self._run.step)
        return True


class MlflowExporter(_OfActiveRun):
    """Writes to the run `run_id`, or to the active run of the thread that logs rollouts."""

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    how = "the thread that logs rollouts has no active MLflow run: call mlflow.start_run(), or give run_id"

    def __init__(self, run_id: str | None = None, *, measures: Sequence[str] | None = None) -> None:
        super().__init__(run_id, measures=measures)
        self._client: Any = None

    def _active(self, tracker: Any) -> str | None:
        active = tracker.active_run()
        return None if active is None else str(active.info.run_id)

    def start(self, run: ExportedRun) -> None:
        """Tag the run with the address of its page."""
        import mlflow

        self._client = mlflow.MlflowClient()
        self._client.set_tag(self._run, f"{PREFIX}page", run.page)

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Write all values of the step in one request."""
        from mlflow.entities import Metric

        milliseconds = now_us() // 1000
        metrics = [Metric(f"{PREFIX}{name}", value, milliseconds, step.step) for name, value in step.values.items()]
        self._client.log_batch(self._run, metrics=metrics)
        return True


class TrackioExporter(_OfActiveRun):
    """Writes to `run` (of `trackio.init`), or to the active run of the thread that logs rollouts."""

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    how = "the thread that logs rollouts has no active trackio run: call trackio.init(), or give run"

    def _active(self, tracker: Any) -> Any:
        return tracker.context_vars.current_run.get()

    def start(self, run: ExportedRun) -> None:
        """Do nothing: the run is open."""

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Add a row for the step; rows of one step are joined by trackio."""
        self._run.log({f"{PREFIX}{name}": value for name, value in step.values.items()}, step=step.step)
        return True
