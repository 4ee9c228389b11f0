"""W&B: the series become part of the trainer's own run.

W&B has one counter of rows in a run and drops what is logged for an earlier row. A row of ours would advance the
counter, and the trainer's `wandb.log(…, step=…)` of an older number would be dropped. Therefore a step joins the row
that the trainer is writing (`commit=False`), one step per row, and the series have an axis of their own,
`foreshock/step`: a late step is a later row with a smaller value on that axis.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from foreshock.exporters.exporter import PREFIX, ExportedRun, Exporter, StepValues

_SETTLE_SECONDS = 0.2
"""`run.step` follows the row that a log call of another thread began; microseconds, unless that thread is held up."""


class WandbExporter(Exporter):
    """Writes to `run`, or to the active run of this process (`wandb.run`)."""

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"

    def __init__(self, run: Any = None, *, measures: Sequence[str] | None = None) -> None:
        super().__init__(measures=measures)
        self._run = run
        self._row: int | None = None

    @property
    def ready(self) -> bool:
        """True if there is an active run."""
        if self._run is None:
            self._run = getattr(sys.modules.get("wandb"), "run", None)
        return self._run is not None

    @property
    def missing(self) -> str:
        """The reason why the exporter is not ready."""
        return "there is no active W&B run in this process: call wandb.init(), or give WandbExporter(run=…)"

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

    def close(self, timeout_seconds: float) -> None:
        """Leave the run open: the trainer finishes it."""
