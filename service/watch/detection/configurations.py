"""How a run is watched: by which settings and rules, and from what its steps and values come.

A run is watched by its closed steps. As long as it has no rollouts, its steps are those of its scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy.orm import Session

from foreshock.digests import digest_of_json
from foreshock.early_warning.detectors import WarningConfiguration
from foreshock.early_warning.quantities import SCALARS, names_of
from foreshock.model_kind import ModelKind
from foreshock_service.platform.database.tables import Run
from foreshock_service.runs.runs.service import find_run
from foreshock_service.watch.rules.service import configuration_with, rule_files_of

_KEPT = 256
"""Configurations that are kept: one for each kind of model, and those of runs with rules or names of their own."""


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The configuration of a run's detectors; snapshots are of one digest.

    `keys` are the quantities that are read, as `comparison:measure`, and `names` the scalars that they may be.
    """

    configuration: WarningConfiguration
    digest: str
    keys: tuple[str, ...]
    scalars_only: bool
    declared: Mapping[str, str]
    names: tuple[str, ...]


def watched_run(session: Session, run_id: str) -> WatchedRun:
    """Return how the run is watched; a run that does not exist, as one of an unknown kind of model."""
    run = find_run(session, run_id)
    return _watched(None, (), True, ()) if run is None else watched_as(session, run)


def watched_as(session: Session, run: Run) -> WatchedRun:
    """Return how the run is watched."""
    declared = tuple(sorted((run.scalar_names or {}).items()))
    return _watched(run.model_kind, rule_files_of(session, run), run.last_step is None, declared)


@lru_cache(maxsize=_KEPT)
def _watched(
    model_kind: ModelKind | None,
    rule_files: tuple[str, ...],
    scalars_only: bool,
    declared_names: tuple[tuple[str, str], ...],
) -> WatchedRun:
    configuration = configuration_with(model_kind, rule_files)
    declared = dict(declared_names)
    digest = configuration.digest()
    if scalars_only or declared:
        digest = digest_of_json({"configuration": digest, "scalars_only": scalars_only, "declared": declared})
    read = [key for key in configuration.keys if scalars_only or key.startswith(f"{SCALARS}:")]
    return WatchedRun(configuration, digest, configuration.keys, scalars_only, declared, names_of(read, declared))
