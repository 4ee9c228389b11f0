"""What the detectors are fed: the values of the closed steps of the surviving history, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep
from foreshock.measures.registry import MEASURES
from service.platform.database.tables import Attempt, Scalar, measurements
from service.runs.attempts.active_attempts import survives
from service.runs.measurements.repository import curves
from service.runs.scalars.repository import FIRST_SOURCE, select_range
from service.watch.detection import repository

_SCALARS = "scalars"
_COLUMNS = frozenset(measure.column for measure in MEASURES)


def closed_steps_after(
    session: Session, run_id: str, attempts: Sequence[Attempt], after: int, keys: Sequence[str]
) -> list[tuple[ClosedStep, int]]:
    """Each closed step beyond `after` with the values of `keys` (`comparison:measure`) that it has, and its attempt."""
    steps = repository.closed_steps(session, run_id, attempts, after)
    if not steps:
        return []
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        comparison, _, measure = key.partition(":")
        wanted[comparison].append(measure)
    bounds = (steps[0][0], steps[-1][0])
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    _add_scalars(session, run_id, attempts, wanted.pop(_SCALARS, []), bounds, values)
    for comparison, measures in wanted.items():
        _add_measurements(session, run_id, attempts, (comparison, measures), bounds, values)
    return [(ClosedStep(step, values[step]), attempt) for step, attempt in steps]


def _add_measurements(
    session: Session,
    run_id: str,
    attempts: Sequence[Attempt],
    wanted: tuple[str, list[str]],
    bounds: tuple[int, int],
    values: defaultdict[int, dict[str, float]],
) -> None:
    comparison, measures = wanted[0], [measure for measure in wanted[1] if measure in _COLUMNS]
    chosen = survives(attempts, measurements.c.attempt, measurements.c.step)
    found = curves(session, run_id, chosen, [comparison], measures, bounds)
    for (step, _, _), row in zip(found.keys, found.values, strict=True):
        for measure, value in zip(measures, row, strict=True):
            if value is not None:
                values[step][f"{comparison}:{measure}"] = value


def _add_scalars(
    session: Session,
    run_id: str,
    attempts: Sequence[Attempt],
    names: list[str],
    bounds: tuple[int, int],
    values: defaultdict[int, dict[str, float]],
) -> None:
    if not names:
        return
    chosen = survives(attempts, Scalar.attempt, Scalar.step)
    rows = select_range(session, run_id, chosen, [], names, bounds)
    for row in sorted(rows, key=lambda each: (each.source != FIRST_SOURCE, each.source)):
        if row.value is not None:
            values[row.step].setdefault(f"{_SCALARS}:{row.name}", row.value)
