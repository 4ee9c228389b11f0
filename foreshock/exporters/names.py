"""Exporters by name."""

from __future__ import annotations

from collections.abc import Iterable

from foreshock.errors import ConfigurationError
from foreshock.exporters.exporter import Exporter
from foreshock.exporters.mlflow import MlflowExporter
from foreshock.exporters.otlp import OtlpExporter
from foreshock.exporters.tensorboard import TensorBoardExporter
from foreshock.exporters.trackio import TrackioExporter
from foreshock.exporters.wandb import WandbExporter

__all__ = ["NAMES", "Export", "make_exporters"]

Export = str | Exporter | Iterable[str | Exporter]

_EXPORTERS: dict[str, type[Exporter]] = {
    each.name: each for each in (WandbExporter, TensorBoardExporter, MlflowExporter, TrackioExporter, OtlpExporter)
}
NAMES = tuple(_EXPORTERS)


def make_exporters(export: Export) -> list[Exporter]:
    """Return the exporters of a name, of comma-separated names, of an Exporter, or of several of these.

    Raises ConfigurationError for an unknown name, for one that is named twice, and if a package is missing.
    """
    entries = [export] if isinstance(export, str | Exporter) else list(export)
    made: list[Exporter] = []
    for entry in entries:
        if isinstance(entry, Exporter):
            made.append(entry)
        else:
            made += [_named(name.strip()) for name in entry.split(",") if name.strip()]
    names = [each.name for each in made]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"export names {name!r} twice; each step would be written twice")
    return made


def _named(name: str) -> Exporter:
    if name not in _EXPORTERS:
        raise ConfigurationError(f"unknown exporter {name!r}; exporters: {', '.join(NAMES)}")
    return _EXPORTERS[name]()
