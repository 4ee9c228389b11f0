"""Queries on the catalogue of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, delete, func, select
from sqlalchemy.orm import Session

from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.database.dialect import insert_rows
from service.platform.database.tables import MeasurementStatistics, Shard, ShardStatistics
from service.platform.database.tables.measurements import MEASUREMENT_KEY
from service.runs.step_key import StepKey


class StoredPart(NamedTuple):
    """What a shard contributes to one comparison of its step."""

    shard: int
    comparison: str
    statistics_version: int
    statistics: bytes
    summaries: bytes | None


def find(session: Session, key: StepKey, shard: int) -> Shard | None:
    """Return the catalogue row of a shard."""
    return session.get(Shard, (*key, shard))


def add(session: Session, row: dict[str, Any]) -> None:
    """Add a catalogue row: the commit point of an upload."""
    insert_rows(session, Shard, [row])


def add_statistics(session: Session, rows: list[dict[str, Any]]) -> None:
    """Add a shard's statistics, one row a comparison."""
    insert_rows(session, ShardStatistics, rows)


def replace_statistics(session: Session, key: StepKey, rows: list[dict[str, Any]]) -> None:
    """Replace all statistics of the shards that these rows belong to."""
    session.execute(
        delete(ShardStatistics).where(
            _of_step(ShardStatistics, key),
            ShardStatistics.shard.in_({row["shard"] for row in rows}),
        )
    )
    add_statistics(session, rows)


def shards_of_step(session: Session, key: StepKey) -> Sequence[Shard]:
    """Return the catalogue rows of a step's shards, in order."""
    return session.scalars(select(Shard).where(_of_step(Shard, key)).order_by(Shard.shard)).all()


def statistics_of_step(session: Session, key: StepKey) -> list[StoredPart]:
    """Return the statistics of a step's shards, by comparison and then in the order of shards."""
    own, whole = ShardStatistics, MeasurementStatistics
    # Those of a shard that is the whole step are held once, by the step.
    query = (
        select(
            own.shard,
            own.comparison,
            own.statistics_version,
            func.coalesce(own.statistics, whole.statistics, type_=own.statistics.type),
            case((own.statistics.is_(None), whole.summaries), else_=own.summaries),
        )
        .outerjoin(whole, and_(*(getattr(whole, name) == getattr(own, name) for name in MEASUREMENT_KEY)))
        .where(_of_step(own, key))
    )
    return [StoredPart(*row) for row in session.execute(query.order_by(own.comparison, own.shard))]


def versions_of_step(session: Session, key: StepKey) -> list[tuple[int, int]]:
    """Return (shard, statistics version) of a step's shards."""
    query = select(ShardStatistics.shard, ShardStatistics.statistics_version)
    return [(shard, version) for shard, version in session.execute(query.where(_of_step(ShardStatistics, key)))]


def out_of_date(session: Session, key: StepKey) -> Sequence[Shard]:
    """Return the shards of a step whose statistics are of another version than this release's, in order."""
    other = select(ShardStatistics.shard).where(
        _of_step(ShardStatistics, key), ShardStatistics.statistics_version != STATISTICS_VERSION
    )
    return session.scalars(
        select(Shard).where(_of_step(Shard, key), Shard.shard.in_(other)).order_by(Shard.shard)
    ).all()


def _of_step(table: type[Shard] | type[ShardStatistics], key: StepKey) -> ColumnElement[bool]:
    return (table.run_id == key.run_id) & (table.attempt == key.attempt) & (table.step == key.step)
