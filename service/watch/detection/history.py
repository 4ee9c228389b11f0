"""The history that the detectors replay: measures and scalars of the active closed steps, in order."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep
from foreshock.early_warning.quantities import SCALARS, quantities_of
from foreshock.early_warning.stretches import ClosedSteps
from foreshock.measures.registry import MEASURES
from foreshock_service.runs.attempts.active_attempts import AttemptStart
from foreshock_service.runs.changes.service import rebaselined_steps
from foreshock_service.runs.measurements.service import measure_columns_of_active_steps, measures_of_active_steps
from foreshock_service.runs.scalars.service import scalars_of_active_steps
from foreshock_service.watch.detection import repository
from foreshock_service.watch.detection.configurations import WatchedRun
from foreshock_service.watch.detection.scalar_steps import closed_scalar_steps

_COLUMNS = frozenset(measure.column for measure in MEASURES)


@dataclass(frozen=True, slots=True)
class History:
    """Closed steps as columns, and the attempt of each."""

    closed: ClosedSteps
    attempts: Sequence[int]


def closed_steps_after(
    session: Session,
    run_id: str,
    attempts: Sequence[AttemptStart],
    after: int,
    watched: WatchedRun,
    limit: int = repository.ALL_STEPS,
) -> list[tuple[ClosedStep, int]]:
    """Return the first `limit` active closed steps beyond `after`, each with the values that are watched and its
    attempt. A value that a step does not have is absent. Without rollouts, the steps and values are those of scalars.
    """
    steps = _steps_after(session, run_id, attempts, after, watched, limit)
    if not steps:
        return []
    bounds = (steps[0][0], steps[-1][0])
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    values |= _scalars(session, run_id, attempts, watched, bounds)
    measured = _measured(watched)
    if measured:
        pairs = [(comparison, column) for comparison, columns in measured.items() for column in columns]
        every = sorted({pair[1] for pair in pairs})
        measures_of = measures_of_active_steps(session, run_id, attempts, sorted(measured), every, bounds)
        for step, measures in measures_of.items():
            values[step] |= {f"{pair[0]}:{pair[1]}": measures[pair] for pair in pairs if pair in measures}
    rebaselined = _first_at_or_after(rebaselined_steps(session, run_id, attempts), after, steps)
    return [(ClosedStep(step, values[step], step in rebaselined), attempt) for step, attempt in steps]


def history_after(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], after: int, watched: WatchedRun, limit: int
) -> History | None:
    """Return what `closed_steps_after` returns, as columns; None if there are no steps."""
    steps = _steps_after(session, run_id, attempts, after, watched, limit)
    if not steps:
        return None
    bounds = (steps[0][0], steps[-1][0])
    numbers = np.array([step for step, _ in steps], dtype=np.int64)
    columns: dict[str, NDArray[np.float64]] = {}
    for step, scalars in _scalars(session, run_id, attempts, watched, bounds).items():
        place = int(np.searchsorted(numbers, step))
        if place < len(numbers) and numbers[place] == step:
            for key, value in scalars.items():
                columns.setdefault(key, np.full(len(numbers), np.nan))[place] = value
    for comparison, names in _measured(watched).items():
        found = measure_columns_of_active_steps(session, run_id, attempts, comparison, names, bounds)
        _, places, rows = np.intersect1d(numbers, found[0], assume_unique=True, return_indices=True)
        for name, values in found[1].items():
            column = columns.setdefault(f"{comparison}:{name}", np.full(len(numbers), np.nan))
            column[places] = values[rows]
    rebaselined = _first_at_or_after(rebaselined_steps(session, run_id, attempts), after, steps)
    return History(ClosedSteps(numbers, columns, frozenset(rebaselined)), [attempt for _, attempt in steps])


def _steps_after(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], after: int, watched: WatchedRun, limit: int
) -> list[tuple[int, int]]:
    if watched.scalars_only:
        return closed_scalar_steps(session, run_id, attempts, after, watched.names, limit)
    return repository.closed_steps(session, run_id, attempts, after, limit)


def _scalars(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], watched: WatchedRun, bounds: tuple[int, int]
) -> dict[int, dict[str, float]]:
    """Return step → quantity → value of the scalars that are watched."""
    keys = frozenset(watched.keys)
    values = {}
    for step, scalars in scalars_of_active_steps(session, run_id, attempts, watched.names, bounds).items():
        values[step] = {
            name: value
            for name, value in quantities_of(scalars, watched.declared, keys).items()
            if name in keys and (watched.scalars_only or name.startswith(f"{SCALARS}:"))
        }
    return values


def _measured(watched: WatchedRun) -> dict[str, list[str]]:
    """Return the columns that are watched of each comparison; of none if the run has scalars only."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in () if watched.scalars_only else watched.keys:
        comparison, _, column = key.partition(":")
        if column in _COLUMNS:
            found[comparison].append(column)
    return found


def _first_at_or_after(changes: Sequence[int], after: int, steps: Sequence[tuple[int, int]]) -> set[int]:
    """Return the first closed step from each change on; changes up to `after` have had theirs."""
    numbers = [step for step, _ in steps]
    places = {bisect_left(numbers, change) for change in changes if change > after}
    return {numbers[place] for place in places if place < len(numbers)}
