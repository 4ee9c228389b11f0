"""What the detectors are fed: the values of the closed steps of the active history, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep
from foreshock.measures.registry import MEASURES
from service.platform.database.tables import Attempt
from service.runs.measurements.service import read_active_curves
from service.runs.scalars.service import scalars_of_active_steps
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
    names = wanted.pop(_SCALARS, [])
    for step, scalars in scalars_of_active_steps(session, run_id, attempts, names, bounds).items() if names else ():
        values[step].update({f"{_SCALARS}:{name}": value for name, value in scalars.items()})
    for comparison, measures in wanted.items():
        columns = [measure for measure in measures if measure in _COLUMNS]
        found = read_active_curves(session, run_id, attempts, [comparison], columns, bounds)
        for (step, _, _), row in zip(found.keys, found.values, strict=True):
            for column, value in zip(columns, row, strict=True):
                if value is not None:
                    values[step][f"{comparison}:{column}"] = value
    return [(ClosedStep(step, values[step]), attempt) for step, attempt in steps]
