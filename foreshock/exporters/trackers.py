"""The trackers that steps are written to: TensorBoard, W&B, MLflow and trackio."""

import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from foreshock.installing import install_command

PREFIX = "foreshock/"

DEFAULT_MEASURES = (
    "k3_kl", "k3_kl_low", "k3_kl_high", "kl", "chi2_token", "tv_token", "ess_token", "ess_seq", "mean_ratio",
    "log_ppl_abs_diff", "mean_abs_d", "p99_abs_d", "max_abs_d", "tail_2", "rollout_probs_diff_mean",
    "rollout_probs_diff_max", "rollout_actor_probs_pearson_corr", "token_mult_prob_error", "pareto_k", "surprisal_z",
    "response_length_mean", "response_length_p99", "truncated_fraction", "reward_mean",
)  # fmt: skip
"""Columns of the registered measures that are exported unless `measures` names others."""


class Exporter:
    """Writes steps to one tracker: to `run`, or to the run that the trainer's own tracker has open.

    Only `attach` is called in the trainer's thread; all else in one other thread. `measures` are columns of
    `GET /v1/measures`; None: DEFAULT_MEASURES.
    """

    name: ClassVar[str]
    """The value of `export` that selects the exporter; also the extra that installs its package."""
    module: ClassVar[str]
    """The module that must be installed."""
    missing: ClassVar[str] = ""
    """What is missing if there is no run, and what to do."""

    def __init__(self, run: Any = None, *, measures: Sequence[str] | None = None) -> None:
        """Raise ConfigurationError if the tracker's package is not installed."""
        if not _is_installed(self.module):
            raise ConfigurationError(
                f"export={self.name!r} needs the package {self.module}, which is not installed; "
                f"run: {install_command(self.name)}"
            )
        self.measures = tuple(DEFAULT_MEASURES if measures is None else measures)
        self._run = run

    def attach(self) -> None:
        """Take the tracker's active run, which some trackers show only to the thread that started it. Quick."""
        tracker = sys.modules.get(self.module)
        if self._run is None and tracker is not None:
            self._run = self._active(tracker)

    def _active(self, tracker: Any) -> Any:
        """Return the active run of the tracker's module, None if there is none."""

    @property
    def ready(self) -> bool:
        """True if steps can be written."""
        return self._run is not None

    def start(self, page: str) -> None:
        """Prepare for the steps of the run whose page is at `page`, before the first one; again after an error."""

    def write(self, step: int, values: Mapping[str, float], *, closing: bool) -> bool:
        """Write the values of a closed step by name, none of them NaN or infinite, and return True; False: call again.

        `closing`: there is no later call.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Write out what is buffered. The tracker's run stays open if the trainer opened it."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


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
        # Read by verl and by transformers.
        variables = ("TENSORBOARD_DIR", "TENSORBOARD_LOGGING_DIR")
        above = next((os.environ[name] for name in variables if os.environ.get(name)), "runs")
        super().__init__(directory or Path(above) / "foreshock", measures=measures)
        self._writer: Any = None

    def start(self, page: str) -> None:
        """Open the event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._run))

    def write(self, step: int, values: Mapping[str, float], *, closing: bool) -> bool:
        """Write the step as plain scalars, which every reader of event files knows, and flush."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        written = [Summary.Value(tag=f"{PREFIX}{name}", simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=written)))
        self._writer.flush()
        return True

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


_SETTLE_SECONDS = 0.2
"""`run.step` changes once a log call of another thread begins a row: in microseconds, unless that thread is delayed."""


class WandbExporter(Exporter):
    """Writes to `run`, or to the active run of this process (`wandb.run`): the series become part of the trainer's own.

    W&B has one counter of rows in a run and drops what is logged for an earlier row. A row of ours would advance the
    counter, and the trainer's `wandb.log(…, step=…)` of an older number would be dropped. Therefore a step joins the
    row that the trainer is writing (`commit=False`), one step per row, and the series have an axis of their own,
    `foreshock/step`: a late step is a later row with a smaller value on that axis.
    """

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    missing = "there is no active W&B run in this process: call wandb.init(), or give WandbExporter(run=…)"
    _row: int | None = None

    @property
    def ready(self) -> bool:
        """True if there is an active run, which any thread sees."""
        self.attach()
        return self._run is not None

    def _active(self, tracker: Any) -> Any:
        return getattr(tracker, "run", None)

    def start(self, page: str) -> None:
        """Define the axis of the series."""
        self._run.define_metric(f"{PREFIX}step", hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        self._run.summary[f"{PREFIX}page"] = page

    def write(self, step: int, values: Mapping[str, float], *, closing: bool) -> bool:
        """Add the step to the trainer's current row; False if that row has one already."""
        row = self._run.step
        if row == self._row:
            if not closing:
                return False
            # End the row that has a step already.
            self._run.log({}, commit=True)
        own = {f"{PREFIX}{name}": value for name, value in values.items()}
        self._run.log({**own, f"{PREFIX}step": step}, commit=closing)
        self._row = None
        if not closing:
            time.sleep(_SETTLE_SECONDS)
            self._row = max(row, self._run.step)
        return True


class MlflowExporter(Exporter):
    """Writes to the run of this id, or to the active run of the thread that logs rollouts."""

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    missing = "the thread that logs rollouts has no active MLflow run: call mlflow.start_run(), or give run_id"
    _client: Any = None

    def _active(self, tracker: Any) -> str | None:
        active = tracker.active_run()
        return None if active is None else str(active.info.run_id)

    def start(self, page: str) -> None:
        """Tag the run with the address of its page."""
        import mlflow

        self._client = mlflow.MlflowClient()
        self._client.set_tag(self._run, f"{PREFIX}page", page)

    def write(self, step: int, values: Mapping[str, float], *, closing: bool) -> bool:
        """Write all values of the step in one request."""
        from mlflow.entities import Metric

        milliseconds = now_us() // 1000
        metrics = [Metric(f"{PREFIX}{name}", value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)
        return True


class TrackioExporter(Exporter):
    """Writes to `run` (of `trackio.init`), or to the active run of the thread that logs rollouts."""

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    missing = "the thread that logs rollouts has no active trackio run: call trackio.init(), or give run"

    def _active(self, tracker: Any) -> Any:
        return tracker.context_vars.current_run.get()

    def write(self, step: int, values: Mapping[str, float], *, closing: bool) -> bool:
        """Add a row for the step; rows of one step are joined by trackio."""
        self._run.log({f"{PREFIX}{name}": value for name, value in values.items()}, step=step)
        return True
