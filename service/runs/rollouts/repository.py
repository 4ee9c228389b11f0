"""Queries on the catalogue of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.database.dialect import insert_if_absent
from service.platform.database.tables import Shard, ShardStatistics


def find(session: Session, run_id: str, attempt: int, step: int, shard: int) -> Shard | None:
    """The catalogue row of a shard."""
    return session.get(Shard, (run_id, attempt, step, shard))


def add(session: Session, row: dict[str, Any]) -> bool:
    """Add a catalogue row: the commit point of an upload. False where the shard is there already."""
    return insert_if_absent(session, Shard, row)


def add_statistics(session: Session, rows: list[dict[str, Any]]) -> None:
    """Add a shard's statistics, one row a comparison."""
    session.execute(insert(ShardStatistics), rows)


def replace_statistics(session: Session, run_id: str, attempt: int, step: int, rows: list[dict[str, Any]]) -> None:
    """Put these rows in the place of all statistics that their shards have."""
    session.execute(
        delete(ShardStatistics).where(
            ShardStatistics.run_id == run_id,
            ShardStatistics.attempt == attempt,
            ShardStatistics.step == step,
            ShardStatistics.shard.in_({row["shard"] for row in rows}),
        )
    )
    add_statistics(session, rows)


def of_step(session: Session, run_id: str, attempt: int, step: int) -> Sequence[Shard]:
    """The shards of a step that are there, in order."""
    query = select(Shard).where(Shard.run_id == run_id, Shard.attempt == attempt, Shard.step == step)
    return session.scalars(query.order_by(Shard.shard)).all()


def statistics_of_step(session: Session, run_id: str, attempt: int, step: int) -> Sequence[ShardStatistics]:
    """The statistics of a step's shards, by comparison and then in the order of shards."""
    query = select(ShardStatistics).where(
        ShardStatistics.run_id == run_id, ShardStatistics.attempt == attempt, ShardStatistics.step == step
    )
    return session.scalars(query.order_by(ShardStatistics.comparison, ShardStatistics.shard)).all()


def out_of_date(session: Session, run_id: str, attempt: int, step: int) -> Sequence[Shard]:
    """The shards of a step whose statistics are of another version than this release's, in order."""
    query = (
        select(Shard)
        .join(
            ShardStatistics,
            (ShardStatistics.run_id == Shard.run_id)
            & (ShardStatistics.attempt == Shard.attempt)
            & (ShardStatistics.step == Shard.step)
            & (ShardStatistics.shard == Shard.shard),
        )
        .where(
            ShardStatistics.run_id == run_id,
            ShardStatistics.attempt == attempt,
            ShardStatistics.step == step,
            ShardStatistics.statistics_version != STATISTICS_VERSION,
        )
    )
    return session.scalars(query.order_by(Shard.shard).distinct()).all()
