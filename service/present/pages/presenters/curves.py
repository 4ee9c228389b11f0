"""The presenter of curves: the rows of the wide table as curves over steps."""

from __future__ import annotations

from collections.abc import Sequence

from service.platform.schemas import LARGEST_STEP
from service.present.pages.figures import Curve
from service.present.pages.presenters.viewing import Viewing
from service.runs.measurements.curves import Curves
from service.runs.measurements.service import CurveQuery, read_curves
from service.runs.scalars.service import read_scalars

# A plot has fewer pixels. Down-sampling keeps extremes.
MOST_POINTS = 2000


def curves_of(
    viewing: Viewing,
    run_id: str,
    measures: Sequence[str],
    comparisons: Sequence[str] = (),
    from_step: int = 0,
) -> dict[str, dict[str, Curve]]:
    """Return comparison → measure column → curve, over the active steps; no comparisons: all."""
    query = CurveQuery(comparisons=comparisons, measures=measures, from_step=from_step, max_points=MOST_POINTS)
    return by_comparison(read_curves(viewing.session, viewing.principal, run_id, query))


def by_comparison(table: Curves) -> dict[str, dict[str, Curve]]:
    """Return the rows of a curve table, as one curve for each comparison and measure."""
    steps: dict[str, list[int]] = {}
    values: dict[str, list[list[float | None]]] = {}
    for (step, _, comparison), row in zip(table.keys, table.values, strict=True):
        steps.setdefault(comparison, []).append(step)
        columns = values.setdefault(comparison, [[] for _ in table.measures])
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return {
        comparison: {
            measure: Curve(steps[comparison], column) for measure, column in zip(table.measures, columns, strict=True)
        }
        for comparison, columns in values.items()
    }


def scalar_curves(viewing: Viewing, run_id: str, names: Sequence[str]) -> dict[str, Curve]:
    """Return scalars by name over the active steps; the trainer's value wins over other sources."""
    columns = read_scalars(viewing.session, viewing.principal, run_id, (), names, None, (0, LARGEST_STEP)).columns
    points: dict[str, dict[int, float | None]] = {}
    for step, source, name, value in zip(columns.step, columns.source, columns.name, columns.value, strict=True):
        of_name = points.setdefault(name, {})
        if step not in of_name or source == "trainer":
            of_name[step] = value
    return {
        name: Curve(sorted(of_name), [of_name[step] for step in sorted(of_name)]) for name, of_name in points.items()
    }
