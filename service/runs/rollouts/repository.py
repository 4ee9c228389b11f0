"""Queries on the catalogue of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.database.dialect import insert_rows
from service.platform.database.tables import Shard, ShardStatistics
from service.runs.step_key import StepKey


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


def statistics_of_step(session: Session, key: StepKey) -> Sequence[ShardStatistics]:
    """Return the statistics of a step's shards, by comparison and then in the order of shards."""
    query = select(ShardStatistics).where(_of_step(ShardStatistics, key))
    return session.scalars(query.order_by(ShardStatistics.comparison, ShardStatistics.shard)).all()


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
