"""The history that the detectors replay: measures and scalars of the active closed steps, in order."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep
from foreshock.measures.registry import MEASURES
from service.runs.attempts.active_attempts import AttemptStart
from service.runs.changes.service import rebaselined_steps
from service.runs.measurements.service import measures_of_active_steps
from service.runs.scalars.service import scalars_of_active_steps
from service.watch.detection import repository

SCALARS = "scalars"
_COLUMNS = frozenset(measure.column for measure in MEASURES)


def closed_steps_after(
    session: Session,
    run_id: str,
    attempts: Sequence[AttemptStart],
    after: int,
    keys: Sequence[str],
    limit: int = repository.ALL_STEPS,
) -> list[tuple[ClosedStep, int]]:
    """Return the first `limit` active closed steps beyond `after`, each with its values of `keys` and its attempt.

    A key is `comparison:measure` or `scalars:name`; a value that a step does not have is absent.
    """
    steps = repository.closed_steps(session, run_id, attempts, after, limit)
    if not steps:
        return []
    bounds = (steps[0][0], steps[-1][0])
    pairs = [(comparison, name) for comparison, _, name in (key.partition(":") for key in keys)]
    names = [name for source, name in pairs if source == SCALARS]
    measured = [(comparison, column) for comparison, column in pairs if column in _COLUMNS]
    comparisons, columns = sorted({pair[0] for pair in measured}), sorted({pair[1] for pair in measured})
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for step, scalars in scalars_of_active_steps(session, run_id, attempts, names, bounds).items():
        values[step] = {f"{SCALARS}:{name}": value for name, value in scalars.items()}
    found = measures_of_active_steps(session, run_id, attempts, comparisons, columns, bounds)
    for step, measures in found.items():
        values[step] |= {f"{pair[0]}:{pair[1]}": measures[pair] for pair in measured if pair in measures}
    rebaselined = _first_at_or_after(rebaselined_steps(session, run_id, attempts), after, steps)
    return [(ClosedStep(step, values[step], step in rebaselined), attempt) for step, attempt in steps]


def _first_at_or_after(changes: Sequence[int], after: int, steps: Sequence[tuple[int, int]]) -> set[int]:
    """Return the first closed step from each change on; changes up to `after` have had theirs."""
    numbers = [step for step, _ in steps]
    places = {bisect_left(numbers, change) for change in changes if change > after}
    return {numbers[place] for place in places if place < len(numbers)}
