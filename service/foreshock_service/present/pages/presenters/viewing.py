"""The context of one page's presenters, and the rows of the wide table as curves over steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy.orm import Session

from foreshock.diagnosis.quantities import FIRST_SOURCE, SCALARS, names_of, preferred_values
from foreshock_service.platform import columnar, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Run, Scalar
from foreshock_service.present.pages.figures import Curve
from foreshock_service.runs import attempts, scalars
from foreshock_service.runs.curves import CurveQuery, read_curves
from foreshock_service.watch.detection.states import observed_steps


@dataclass(frozen=True, slots=True)
class Viewing:
    """The context of every presenter. Its session only reads, because a page never writes."""

    context: ServiceContext
    session: Session
    principal: security.Principal


NOTHING = Curve((), ())


def curves_of(
    viewing: Viewing, run_id: str, measures: Sequence[str], comparisons: Sequence[str] = ()
) -> dict[str, dict[str, Curve]]:
    """Return comparison → measure column → curve over the active steps; without `comparisons`, of all of them."""
    query = CurveQuery(comparisons=comparisons, measures=measures, max_points=None)
    curves = read_curves(viewing.session, viewing.context, viewing.principal, run_id, query)
    return {
        comparison: {
            measure: Curve(table.array("step").tolist(), columnar.floats_or_none(table.array(measure)))
            for measure in curves.measures
        }
        for comparison, table in curves.by_comparison().items()
    }


def scalar_curves(viewing: Viewing, run_id: str, names: Sequence[str]) -> dict[str, Curve]:
    """Return scalars by name over the active steps; the trainer's value wins over other sources."""
    active, settings = attempts.active_rows(viewing.session, run_id, Scalar), viewing.context.settings
    read = partial(scalars.scalar_table, viewing.session, settings, run_id, active, max_points=None)
    try:
        tables = [read(names=names)]
    except columnar.AnswerTooLarge:
        # Of a run of 10^5 steps each curve alone is small enough.
        tables = [read(names=[name]) for name in names]
    points: dict[str, dict[int, float | None]] = {}
    for table in tables:
        columns = (table.array("step").tolist(), table.strings("source"), table.strings("name"))
        for step, source, name, value in zip(*columns, columnar.floats_or_none(table.array("value")), strict=True):
            of_name = points.setdefault(name, {})
            if step not in of_name or source == FIRST_SOURCE:
                of_name[step] = value
    return {
        name: Curve(sorted(of_name), [of_name[step] for step in sorted(of_name)]) for name, of_name in points.items()
    }


def quantity_curves(viewing: Viewing, run: Run, quantities: Sequence[str]) -> dict[str, Curve]:
    """Return quantity → curve over the active steps: as measured, else as the run's trainer reports it."""
    keys = {quantity: quantity.split(":", 1) for quantity in quantities}
    pairs = [(comparison, column) for comparison, column in keys.values() if comparison != SCALARS]
    comparisons, columns = ([*dict.fromkeys(part)] for part in zip(*pairs, strict=True)) if pairs else ([], [])
    measured = curves_of(viewing, run.id, columns, comparisons) if pairs else {}
    found = {each: measured.get(key[0], {}).get(key[1], NOTHING) for each, key in keys.items()}
    declared, missing = run.scalar_names or {}, [each for each, curve in found.items() if not curve]
    if missing:
        reported = scalar_curves(viewing, run.id, names_of(missing, declared))
        points = {name: dict(curve.points()) for name, curve in reported.items()}
        for each in missing:
            values = preferred_values(points, names_of([each], declared))
            found[each] = Curve(list(values), list(values.values()))
    return found


def last_steps(session: Session, runs: Sequence[Run]) -> dict[str, int]:
    """Return the newest step of each run that has one, also of runs with only scalars."""
    observed = observed_steps(session, [run.id for run in runs])
    steps_of = {run.id: observed.get(run.id) if run.last_step is None else run.last_step for run in runs}
    return {run_id: step for run_id, step in steps_of.items() if step is not None}
