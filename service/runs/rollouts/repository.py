"""Queries on the catalogue of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, case, delete, exists, func, select
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.platform.database.engine import insert_rows
from foreshock_service.platform.database.tables import MeasurementStatistics, Shard, ShardStatistics, Step
from foreshock_service.platform.database.tables.watch import MEASUREMENT_KEY
from foreshock_service.runs.step_key import StepKey

# What a shard is measured by; a step has the comparisons of its probes beside them.
_OF_SHARDS = (STEP_ROW, TRAINER_ROLLOUT)


class StoredPart(NamedTuple):
    """What a shard contributes to one comparison of its step."""

    shard: int
    comparison: str
    statistics_version: int
    statistics: bytes
    summaries: bytes | None


class StoredTokens(NamedTuple):
    """The token file of a shard; `tokens_removed`: why it is no longer in the store."""

    shard: int
    file: str
    tokens_removed: str | None


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


def files_of_step(session: Session, key: StepKey) -> list[StoredTokens]:
    """Return where the tokens of a step's shards are, in order."""
    query = select(Shard.shard, Shard.file, Shard.tokens_removed).where(_of_step(Shard, key)).order_by(Shard.shard)
    return [StoredTokens(*row) for row in session.execute(query)]


def statistics_of_step(session: Session, key: StepKey) -> list[StoredPart]:
    """Return the statistics of a step's shards, by comparison and then in the order of shards."""
    own, whole = ShardStatistics, MeasurementStatistics
    # Older rows of a shard that is the whole step have no statistics.
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
    parts = [StoredPart(*row) for row in session.execute(query.order_by(own.comparison, own.shard))]
    if parts:
        return parts
    query = _of_whole_step(
        key, Shard.shard, whole.comparison, whole.statistics_version, whole.statistics, whole.summaries
    )
    return [StoredPart(*row) for row in session.execute(query.order_by(whole.comparison))]


def versions_of_step(session: Session, key: StepKey) -> list[tuple[int, int]]:
    """Return (shard, statistics version) of a step's shards."""
    own = select(ShardStatistics.shard, ShardStatistics.statistics_version).where(_of_step(ShardStatistics, key))
    whole = _of_whole_step(key, Shard.shard, MeasurementStatistics.statistics_version)
    return [(shard, version) for shard, version in session.execute(own.union_all(whole))]


def out_of_date(session: Session, key: StepKey) -> Sequence[Shard]:
    """Return the shards of a step whose statistics are of another version than this release's, in order."""
    other = {shard for shard, version in versions_of_step(session, key) if version != STATISTICS_VERSION}
    return [shard for shard in shards_of_step(session, key) if shard.shard in other] if other else []


def _of_whole_step(key: StepKey, *columns: Any) -> Select[Any]:
    """Return the query for the statistics of a step's only shard, which has no rows; it finds none of other steps."""
    whole = MeasurementStatistics
    query = (
        select(*columns)
        .select_from(Shard)
        .join(whole, (whole.run_id == Shard.run_id) & (whole.attempt == Shard.attempt) & (whole.step == Shard.step))
    )
    query = query.join(
        Step, (Step.run_id == Shard.run_id) & (Step.attempt == Shard.attempt) & (Step.step == Shard.step)
    )
    own = exists().where(_of_step(ShardStatistics, key))
    return query.where(_of_step(Shard, key), Step.expected_shards == 1, whole.comparison.in_(_OF_SHARDS), ~own)


def _of_step(table: type[Shard] | type[ShardStatistics], key: StepKey) -> ColumnElement[bool]:
    return (table.run_id == key.run_id) & (table.attempt == key.attempt) & (table.step == key.step)
