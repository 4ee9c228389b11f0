"""Queries on measurements: the wide table and the statistics beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, bindparam, case, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.platform.database.engine import insert_for, table_of, upsert
from foreshock_service.platform.database.tables import (
    Attempt,
    MeasurementStatistics,
    NewestMeasurement,
    Step,
    measurements,
)
from foreshock_service.platform.database.tables.watch import MEASUREMENT_KEY
from foreshock_service.runs.attempts.active_attempts import ActiveRange, AttemptStart, active_ranges, is_active
from foreshock_service.runs.measurements.curves import KEYS, MeasuredStep
from foreshock_service.runs.step_key import StepKey

_BEYOND_EVERY_STEP = 2**62
_FIRST_REVISION = {"revision": 1, "rewritten": 1}


def put(session: Session, rows: Sequence[Mapping[str, Any]], statistics: Sequence[Mapping[str, Any]]) -> None:
    """Insert or overwrite measurements and their statistics."""
    upsert(session, measurements, rows, MEASUREMENT_KEY)
    upsert(session, MeasurementStatistics, statistics, MEASUREMENT_KEY)


def note_newest(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Note that these steps were measured: key and `buckets` of each. The run is locked."""
    if not rows:
        return
    table = table_of(NewestMeasurement)
    statement = insert_for(session, table)
    new, old = statement.excluded, table.c
    # A late shard of the newest step measures it again.
    is_newest = tuple_(new.attempt, new.step) >= tuple_(old.attempt, old.step)
    is_newer = tuple_(new.attempt, new.step) > tuple_(old.attempt, old.step)
    changed: dict[str, ColumnElement[Any]] = {
        name: case((is_newest, new[name]), else_=old[name]) for name in ("attempt", "step", "buckets")
    }
    changed["revision"] = old.revision + 1
    changed["rewritten"] = case((is_newer, old.rewritten), else_=old.revision + 1)
    statement = statement.on_conflict_do_update(index_elements=["run_id", "comparison"], set_=changed)
    session.execute(statement, [{**row, **_FIRST_REVISION} for row in rows])


def statistics_of(session: Session, key: StepKey, comparison: str) -> MeasurementStatistics | None:
    """Return the folded statistics of one comparison at one step."""
    return session.get(MeasurementStatistics, (*key, comparison))


def incomplete_steps(session: Session, run_id: str, attempts: Sequence[AttemptStart], limit: int) -> Sequence[Step]:
    """Return up to `limit` active closed steps that lack shards, newest first."""
    query = select(Step).where(
        Step.run_id == run_id,
        Step.closed_at_us.is_not(None),
        Step.received_shards < Step.expected_shards,
        is_active(attempts, Step.attempt, Step.step),
    )
    return session.scalars(query.order_by(Step.step.desc()).limit(limit)).all()


def incomplete_counts(session: Session, run_ids: Collection[str]) -> dict[str, int]:
    """Return how many active closed steps of each run lack shards, in one query; runs without one are absent."""
    later = aliased(Attempt)
    superseded = select(later.attempt).where(
        later.run_id == Step.run_id, later.attempt > Step.attempt, later.resume_step <= Step.step
    )
    query = select(Step.run_id, func.count()).where(
        Step.run_id.in_(run_ids),
        Step.closed_at_us.is_not(None),
        Step.received_shards < Step.expected_shards,
        ~superseded.exists(),
    )
    return {row[0]: row[1] for row in session.execute(query.group_by(Step.run_id))}


def versions_of_step(session: Session, key: StepKey) -> Sequence[int]:
    """Return the version of the statistics of each comparison of a step."""
    table = MeasurementStatistics
    query = select(table.statistics_version).where(
        table.run_id == key.run_id, table.attempt == key.attempt, table.step == key.step
    )
    return session.scalars(query).all()


def versions_of_ends(session: Session, run_id: str) -> list[int]:
    """Return the versions of the statistics of a run's oldest and newest step; empty before there are any."""
    table = MeasurementStatistics
    query = select(table.statistics_version).where(table.run_id == run_id)
    ends = ((table.attempt, table.step), (table.attempt.desc(), table.step.desc()))
    found = [session.scalar(query.order_by(*order).limit(1)) for order in ends]
    return [version for version in found if version is not None]


def comparisons_of(session: Session, key: StepKey) -> list[str]:
    """Return the names of the comparisons that a step has."""
    table = measurements.c
    query = select(table.comparison).where(
        table.run_id == key.run_id, table.attempt == key.attempt, table.step == key.step
    )
    return list(session.scalars(query.order_by(table.comparison)))


def values_in_range(
    session: Session, run_id: str, steps: ActiveRange, comparisons: Sequence[str], columns: Sequence[str]
) -> list[tuple[int, str, tuple[float | None, ...]]]:
    """Return (step, comparison, the value of each column) in a range of steps."""
    rows = rows_in_range(session, run_id, steps, comparisons, columns)
    return [(row[0], row[1], tuple(row[2:])) for row in rows]


def rows_in_range(
    session: Session, run_id: str, steps: ActiveRange, comparisons: Sequence[str], columns: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Return a row of step, comparison and the value of each column for each measurement in a range of steps."""
    table = measurements.c
    query = select(table.step, table.comparison, *(table[name] for name in columns)).where(
        table.run_id == run_id, *steps.contains(table.attempt, table.step), table.comparison.in_(comparisons)
    )
    return [tuple(row) for row in session.execute(query)]


def newest_steps(
    session: Session, run_ids: Collection[str], comparison: str, columns: Sequence[str], count: int
) -> dict[str, list[MeasuredStep]]:
    """Return up to `count` of each run's newest active steps with the comparison, in step order, in one query."""
    table, inner, later = measurements.c, measurements.alias(), aliased(Attempt)
    end = select(func.min(later.resume_step)).where(later.run_id == Attempt.run_id, later.attempt > Attempt.attempt)
    newest = (
        select(inner.c.step)
        .where(
            inner.c.run_id == Attempt.run_id,
            inner.c.attempt == Attempt.attempt,
            inner.c.comparison == comparison,
            # Steps from the resume step of a later attempt on are superseded.
            inner.c.step < func.coalesce(end.correlate(Attempt).scalar_subquery(), _BEYOND_EVERY_STEP),
        )
        .order_by(inner.c.step.desc())
        .limit(count)
        .correlate(Attempt)
    )
    query = (
        select(table.run_id, table.attempt, table.step, table.computed_at_us, *(table[name] for name in columns))
        .join(Attempt, (Attempt.run_id == table.run_id) & (Attempt.attempt == table.attempt))
        .where(table.run_id.in_(run_ids), table.comparison == comparison, table.step.in_(newest.scalar_subquery()))
        .order_by(table.step)
    )
    found: defaultdict[str, list[MeasuredStep]] = defaultdict(list)
    for row in session.execute(query):
        values = dict(zip(columns, row[4:], strict=True))
        found[row[0]].append(MeasuredStep(StepKey(row[0], row[1], row[2]), row[3], values))
    return {run_id: steps[-count:] for run_id, steps in found.items()}


def newest_rows(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], columns: Sequence[str], count: int
) -> list[tuple[Any, ...]]:
    """Return (step, comparison, the columns) of the logged comparisons of the newest `count` active steps, in order."""
    found: list[tuple[Any, ...]] = []
    for each in active_ranges(attempts):
        parameters = {"run_id": run_id, "rows": 2 * count - len(found), **each.parameters()}
        found += [tuple(row) for row in session.execute(_newest_rows(tuple(columns)), parameters)]
        if len(found) >= 2 * count:
            break
    return found[::-1]


@cache
def _newest_rows(columns: tuple[str, ...]) -> Select[Any]:
    table = measurements.c
    query = select(table.step, table.comparison, *(table[name] for name in columns)).where(
        table.run_id == bindparam("run_id"),
        table.attempt == bindparam("attempt"),
        table.step.between(bindparam("first"), bindparam("end") - 1),
        table.comparison.in_((STEP_ROW, TRAINER_ROLLOUT)),
    )
    return query.order_by(table.step.desc(), table.comparison).limit(bindparam("rows", type_=BigInteger))


def summaries_of(session: Session, keys: Collection[StepKey], comparison: str) -> dict[StepKey, bytes]:
    """Return the rollout summaries of these steps that this release can read; one query."""
    return _blobs_of(session, keys, comparison, MeasurementStatistics.summaries)


def statistics_of_steps(session: Session, keys: Collection[StepKey], comparison: str) -> dict[StepKey, bytes]:
    """Return the folded statistics of these steps that this release can read; one query."""
    return _blobs_of(session, keys, comparison, MeasurementStatistics.statistics)


def _blobs_of(
    session: Session,
    keys: Collection[StepKey],
    comparison: str,
    blob: InstrumentedAttribute[bytes] | InstrumentedAttribute[bytes | None],
) -> dict[StepKey, bytes]:
    table = MeasurementStatistics
    query = select(table.run_id, table.attempt, table.step, blob).where(
        tuple_(table.run_id, table.attempt, table.step).in_([tuple(key) for key in keys]),
        table.comparison == comparison,
        table.statistics_version == STATISTICS_VERSION,
    )
    return {StepKey(*row[:3]): row[3] for row in session.execute(query) if row[3] is not None}


def curves_query(
    run_id: str,
    chosen: ColumnElement[bool],
    comparisons: Sequence[str],
    measures: Sequence[str],
    steps: tuple[int, int],
) -> Select[Any]:
    """Return the query for `KEYS` and the measures over `steps[0]` ≤ step ≤ `steps[1]`; no comparisons: all."""
    table = measurements.c
    columns = (*KEYS, *measures)
    query = select(*(table[name] for name in columns)).where(table.run_id == run_id, chosen, table.step.between(*steps))
    return query.where(table.comparison.in_(comparisons)) if comparisons else query
