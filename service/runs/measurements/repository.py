"""Queries on measurements: the wide table and the statistics beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock.measures.registry import MEASURES
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.database.dialect import upsert
from service.platform.database.tables import MeasurementStatistics, measurements
from service.platform.database.tables.measurements import MEASUREMENT_KEY


@dataclass(frozen=True, slots=True)
class Curves:
    """Rows of the wide table: (step, attempt, comparison) of each, and the chosen measures, None where absent.

    `from_sample` says of each row whether only some of the step's rollouts took part.
    """

    measures: tuple[str, ...]
    keys: list[tuple[int, int, str]]
    values: list[tuple[float | None, ...]]
    from_sample: list[bool]

    def rows(self, chosen: Sequence[int]) -> Curves:
        """These rows only, in this order."""
        return Curves(
            self.measures,
            [self.keys[row] for row in chosen],
            [self.values[row] for row in chosen],
            [self.from_sample[row] for row in chosen],
        )


def put(session: Session, row: Mapping[str, Any], statistics: Mapping[str, Any]) -> None:
    """Insert or overwrite a measurement and its statistics."""
    upsert(session, measurements, [row], MEASUREMENT_KEY)
    upsert(session, MeasurementStatistics, [statistics], MEASUREMENT_KEY)


def of_step(session: Session, run_id: str, attempt: int, step: int) -> dict[str, dict[str, float]]:
    """The values that a step has: comparison → measure → value."""
    table = measurements.c
    columns = [table[measure.column] for measure in MEASURES]
    query = select(table.comparison, *columns).where(
        table.run_id == run_id, table.attempt == attempt, table.step == step
    )
    return {
        comparison: {
            measure.column: value for measure, value in zip(MEASURES, values, strict=True) if value is not None
        }
        for comparison, *values in session.execute(query)
    }


def statistics_of(
    session: Session, run_id: str, attempt: int, step: int, comparison: str
) -> MeasurementStatistics | None:
    """The folded statistics of one comparison at one step."""
    return session.get(MeasurementStatistics, (run_id, attempt, step, comparison))


def has_another_version(session: Session, run_id: str, attempt: int | None = None, step: int | None = None) -> bool:
    """Whether statistics of the step are of another version than this release's; of the whole run, its oldest and its
    newest step are asked, since steps are measured in order.
    """
    table = MeasurementStatistics
    query = select(table.statistics_version).where(table.run_id == run_id)
    if attempt is not None and step is not None:
        versions = session.scalars(query.where(table.attempt == attempt, table.step == step)).all()
        return any(version != STATISTICS_VERSION for version in versions)
    ends = ((table.attempt, table.step), (table.attempt.desc(), table.step.desc()))
    found = [session.scalar(query.order_by(*order).limit(1)) for order in ends]
    return any(version not in (None, STATISTICS_VERSION) for version in found)


def comparisons_of(session: Session, run_id: str, attempt: int, step: int) -> list[str]:
    """The names of the comparisons that a step has."""
    table = measurements.c
    query = select(table.comparison).where(table.run_id == run_id, table.attempt == attempt, table.step == step)
    return list(session.scalars(query.order_by(table.comparison)))


def curves(
    session: Session,
    run_id: str,
    chosen: ColumnElement[bool],
    comparisons: Sequence[str],
    measures: Sequence[str],
    steps: tuple[int, int],
) -> Curves:
    """The chosen measures over `steps[0]` ≤ step ≤ `steps[1]`, by comparison and step; no comparisons: all of them."""
    table = measurements.c
    query = select(
        table.step, table.attempt, table.comparison, table.from_sample, *(table[name] for name in measures)
    ).where(table.run_id == run_id, chosen, table.step.between(*steps))
    if comparisons:
        query = query.where(table.comparison.in_(comparisons))
    rows = session.execute(query.order_by(table.comparison, table.step, table.attempt)).all()
    return Curves(
        tuple(measures),
        [tuple(row[:3]) for row in rows],
        [tuple(row[4:]) for row in rows],
        [row.from_sample for row in rows],
    )
