"""Exporters: write the service's results as series next to the reward in W&B, TensorBoard, MLflow or trackio.

    foreshock.Client(run_key="my-run", export="wandb")

A thread fetches each closed step from the service and writes it as `foreshock/k3_kl`, `foreshock/lr_scale`, … No
exporter waits in, or raises into, the training thread. docs/exporters.md has the series of each step.
"""

from foreshock.exporters.exports import make_exporters
from foreshock.exporters.trackers import (
    DEFAULT_MEASURES,
    Exporter,
    MlflowExporter,
    TensorBoardExporter,
    TrackioExporter,
    WandbExporter,
)

__all__ = [
    "DEFAULT_MEASURES",
    "Exporter",
    "MlflowExporter",
    "TensorBoardExporter",
    "TrackioExporter",
    "WandbExporter",
    "make_exporters",
]
