"""Queries on the steps to measure again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, func, or_, select
from sqlalchemy.orm import Session

from foreshock.measures.registry import COMPARISON_MEASURES
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.platform.database.tables import (
    MeasurementStatistics,
    Run,
    Shard,
    ShardStatistics,
    Step,
    measurements,
)
from foreshock_service.runs.step_key import StepKey

_COUNTS = [measure.column for measure in COMPARISON_MEASURES if measure.column_type == "integer"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of steps; None: every run, every attempt, every step. `everything`: also those that are up to date."""

    run_id: str | None = None
    attempt: int | None = None
    step: int | None = None
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """Amount of data of a step: shards and bytes."""

    shards: int
    file_bytes: int


def steps_to_measure(session: Session, choice: Choice) -> list[StepKey]:
    """Return the selected steps, in order."""
    query = select(Step.run_id, Step.attempt, Step.step).join(Run, Run.id == Step.run_id)
    query = query.where(Run.deleted_at_us.is_(None))
    for column, wanted in ((Step.run_id, choice.run_id), (Step.attempt, choice.attempt), (Step.step, choice.step)):
        if wanted is not None:
            query = query.where(column == wanted)
    if not choice.everything:
        old = _of_another_version(ShardStatistics) | _of_another_version(MeasurementStatistics)
        query = query.where(old | _without_newest_measures())
    ordered = query.order_by(Run.created_at_us, Step.run_id, Step.attempt, Step.step)
    return [StepKey(*row) for row in session.execute(ordered)]


def extent_of(session: Session, key: StepKey) -> Extent:
    """Return the number of a step's shards and the bytes of their files together."""
    query = select(func.count(), func.coalesce(func.sum(Shard.file_bytes), 0))
    chosen = query.where(Shard.run_id == key.run_id, Shard.attempt == key.attempt, Shard.step == key.step)
    shards, file_bytes = session.execute(chosen).one()
    return Extent(int(shards), int(file_bytes))


def old_comparisons(session: Session, key: StepKey) -> Sequence[str]:
    """Return the comparisons of a step whose measurement is of another version."""
    table = MeasurementStatistics
    query = select(table.comparison).where(
        table.run_id == key.run_id,
        table.attempt == key.attempt,
        table.step == key.step,
        table.statistics_version != STATISTICS_VERSION,
    )
    return session.scalars(query.order_by(table.comparison)).all()


def _without_newest_measures() -> ColumnElement[bool]:
    """Whether a step has a comparison that was measured before a column existed: a measured count is never NULL.

    A new measure without a count of its own is not found: `--everything` computes it for older steps.
    """
    columns = measurements.c
    return exists().where(
        columns.run_id == Step.run_id,
        columns.attempt == Step.attempt,
        columns.step == Step.step,
        columns.tokens.is_not(None),
        or_(*(columns[name].is_(None) for name in _COUNTS)),
    )


def _of_another_version(table: type[ShardStatistics] | type[MeasurementStatistics]) -> ColumnElement[bool]:
    return exists().where(
        table.run_id == Step.run_id,
        table.attempt == Step.attempt,
        table.step == Step.step,
        table.statistics_version != STATISTICS_VERSION,
    )
