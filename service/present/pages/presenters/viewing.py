"""The database as one page's presenters see it, and the rows of the wide table as curves over steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock_service.platform import columnar, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Scalar
from foreshock_service.present.pages.figures import Curve
from foreshock_service.runs import attempts, scalars
from foreshock_service.runs.curves import CurveQuery, Curves, read_curves


@dataclass(frozen=True, slots=True)
class Viewing:
    """The context of every presenter. Its session only reads: a page never writes."""

    context: ServiceContext
    session: Session
    principal: security.Principal


@contextmanager
def open_viewing(context: ServiceContext, principal: security.Principal) -> Iterator[Viewing]:
    """Give the viewing of one request; its session is closed at the end."""
    with context.database.read() as session:
        yield Viewing(context, session, principal)


GRADIENT_NORMS = ("grad_norm", "actor/grad_norm", "train/grad_norm")
ENTROPIES = ("entropy", "actor/entropy", "actor/entropy_loss")
LEARNING_RATES = ("lr", "learning_rate", "actor/lr", "train/learning_rate")
REWARDS = ("reward", "critic/rewards/mean", "train/reward")


# A plot has fewer pixels. Down-sampling keeps extremes.
MOST_POINTS = 2000


def curves_of(
    viewing: Viewing,
    run_id: str,
    measures: Sequence[str],
    comparisons: Sequence[str] = (),
    from_step: int = 0,
    max_points: int | None = MOST_POINTS,
) -> dict[str, dict[str, Curve]]:
    """Return comparison → measure column → curve, over the active steps; no comparisons: all.

    `max_points` None: every step, for conclusions that down-sampling would change.
    """
    query = CurveQuery(comparisons=comparisons, measures=measures, from_step=from_step, max_points=max_points)
    return by_comparison(read_curves(viewing.session, viewing.context, viewing.principal, run_id, query))


def by_comparison(curves: Curves) -> dict[str, dict[str, Curve]]:
    """Return one curve for each comparison and measure."""
    return {
        comparison: {
            measure: Curve(table.array("step").tolist(), columnar.floats_or_none(table.array(measure)))
            for measure in curves.measures
        }
        for comparison, table in curves.by_comparison().items()
    }


def scalar_curves(
    viewing: Viewing, run_id: str, names: Sequence[str], max_points: int | None = MOST_POINTS
) -> dict[str, Curve]:
    """Return scalars by name over the active steps; the trainer's value wins over other sources."""
    active = attempts.rows_of_steps(viewing.session, run_id, None, (Scalar.attempt, Scalar.step))
    table = scalars.scalar_table(
        viewing.session, viewing.context.settings, run_id, active, names=names, max_points=max_points
    )
    columns = (table.array("step").tolist(), table.strings("source"), table.strings("name"))
    points: dict[str, dict[int, float | None]] = {}
    for step, source, name, value in zip(*columns, columnar.floats_or_none(table.array("value")), strict=True):
        of_name = points.setdefault(name, {})
        if step not in of_name or source == scalars.FIRST_SOURCE:
            of_name[step] = value
    return {
        name: Curve(sorted(of_name), [of_name[step] for step in sorted(of_name)]) for name, of_name in points.items()
    }


def first_of(curves: Mapping[str, Curve], names: Sequence[str]) -> Curve:
    """Return the first curve of these names that has a point; an empty one if none has."""
    return next((curves[name] for name in names if curves.get(name)), Curve((), ()))
