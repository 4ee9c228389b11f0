"""MLflow: metrics of the trainer's active run, through a client of their own."""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from foreshock.clock import now_us
from foreshock.exporters.exporter import PREFIX, ExportedRun, Exporter, StepValues


class MlflowExporter(Exporter):
    """Writes to the run `run_id`, or to the active run of the thread that logs rollouts."""

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"

    def __init__(self, run_id: str | None = None, *, measures: Sequence[str] | None = None) -> None:
        super().__init__(measures=measures)
        self._run_id = run_id
        self._client: Any = None

    def attach(self) -> None:
        """Take the active run: MLflow shows it only to the thread that started it."""
        mlflow = sys.modules.get("mlflow")
        if self._run_id is None and mlflow is not None:
            active = mlflow.active_run()
            self._run_id = None if active is None else str(active.info.run_id)

    @property
    def ready(self) -> bool:
        """True if there is a run."""
        return self._run_id is not None

    @property
    def missing(self) -> str:
        """The reason why the exporter is not ready."""
        return "the thread that logs rollouts has no active MLflow run: call mlflow.start_run(), or give run_id"

    def start(self, run: ExportedRun) -> None:
        """Tag the run with the address of its page."""
        import mlflow

        self._client = mlflow.MlflowClient()
        self._client.set_tag(self._run_id, f"{PREFIX}page", run.page)

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Write all values of the step in one request."""
        from mlflow.entities import Metric

        milliseconds = now_us() // 1000
        metrics = [Metric(f"{PREFIX}{name}", value, milliseconds, step.step) for name, value in step.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        return True

    def close(self, timeout_seconds: float) -> None:
        """Leave the run open: the trainer ends it. Nothing is buffered."""
