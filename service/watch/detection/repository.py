"""Queries on detector snapshots and on the closed steps that detectors replay.

They run whenever a step closes, so the statements are built and compiled once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, func, or_, select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_rows, table_of, upsert
from foreshock_service.platform.database.prepared import Prepared
from foreshock_service.platform.database.tables import DetectorSnapshot, DueReplay, Run, ScalarTail, Step
from foreshock_service.runs.attempts.active_attempts import AttemptStart, active_ranges

ALL_STEPS = 2**62


class Due(NamedTuple):
    """A replay that is due: the first and the last step that changed, and the number of changes."""

    from_step: int
    through_step: int
    changes: int


class Snapshot(NamedTuple):
    """The detectors' state after a step, as `WarningState.to_bytes`; None if it is not stored (see `states.py`)."""

    attempt: int
    step: int
    configuration_digest: str
    milestone: bool
    identity: int
    state: bytes | None


_snapshots = table_of(DetectorSnapshot).c
_OF_RUN = _snapshots.run_id == bindparam("run_id")

_steps = table_of(Step).c
_CLOSED_STEPS = Prepared(
    select(_steps.step, _steps.attempt)
    .where(
        _steps.run_id == bindparam("run_id"),
        _steps.attempt == bindparam("attempt"),
        _steps.step >= bindparam("first"),
        _steps.step < bindparam("end"),
        _steps.closed_at_us.is_not(None),
    )
    .order_by(_steps.step)
    .limit(bindparam("at_most"))
)
_SNAPSHOTS_BEFORE = Prepared(
    select(*(_snapshots[name] for name in Snapshot._fields))
    .where(
        _OF_RUN,
        _snapshots.attempt == bindparam("attempt"),
        _snapshots.step >= bindparam("first"),
        _snapshots.step < bindparam("end"),
        _snapshots.configuration_digest == bindparam("configuration_digest"),
    )
    .order_by(_snapshots.step.desc())
    .limit(bindparam("at_most"))
)
_NEWEST_SNAPSHOT_OF_RUN = Prepared(
    select(*(_snapshots[name] for name in Snapshot._fields)).where(_OF_RUN).order_by(_snapshots.step.desc()).limit(1)
)
_SNAPSHOT_AT = Prepared(
    select(*(_snapshots[name] for name in Snapshot._fields)).where(
        _OF_RUN, _snapshots.attempt == bindparam("attempt"), _snapshots.step == bindparam("at")
    )
)
_SNAPSHOTS_AFTER = Prepared(
    select(_snapshots.attempt, _snapshots.step).where(
        _OF_RUN, _snapshots.step > bindparam("after"), _snapshots.step <= bindparam("last")
    )
)
_DROP_SNAPSHOT = Prepared(
    delete(table_of(DetectorSnapshot)).where(
        _OF_RUN, _snapshots.attempt == bindparam("attempt"), _snapshots.step == bindparam("at")
    )
)
_due = table_of(DueReplay).c
_DUE = Prepared(select(_due.from_step, _due.through_step, _due.changes).where(_due.run_id == bindparam("run_id")))
_DROP_DUE = Prepared(delete(table_of(DueReplay)).where(_due.run_id == bindparam("run_id")))
_DROP_SNAPSHOTS = Prepared(delete(table_of(DetectorSnapshot)).where(_OF_RUN, _snapshots.step >= bindparam("from_step")))
_OLDEST_KEPT = (
    select(_snapshots.step)
    .where(_OF_RUN)
    .order_by(_snapshots.step.desc())
    .offset(bindparam("others_kept"))
    .limit(1)
    .scalar_subquery()
)
_DROP_PASSING_SNAPSHOTS = Prepared(
    delete(table_of(DetectorSnapshot)).where(_OF_RUN, _snapshots.milestone.is_(False), _snapshots.step < _OLDEST_KEPT)
)
_PASSED = Prepared(
    select(_snapshots.attempt, _snapshots.step)
    .where(_OF_RUN, _snapshots.milestone.is_(False), _snapshots.step < _OLDEST_KEPT)
    .limit(2)
)
_REPLACE_SNAPSHOT = Prepared(
    update(table_of(DetectorSnapshot))
    .where(_OF_RUN, _snapshots.attempt == bindparam("old_attempt"), _snapshots.step == bindparam("old_step"))
    .values({_snapshots[name]: bindparam(f"new_{name}") for name in Snapshot._fields})
)


def closed_steps(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], after: int, limit: int = ALL_STEPS
) -> list[tuple[int, int]]:
    """Return (step, attempt) of the first `limit` active closed steps beyond `after`, in order."""
    found = [
        (step, attempt)
        for each in reversed(active_ranges(attempts, first=after + 1))
        for step, attempt in _CLOSED_STEPS.rows(session, {"run_id": run_id, "at_most": limit, **each.parameters()})
    ]
    return found[:limit]


def snapshots_before(
    session: Session,
    run_id: str,
    attempts: Sequence[AttemptStart],
    before: int,
    configuration_digest: str,
    at_most: int,
) -> Iterator[Snapshot]:
    """Yield the newest snapshots of active steps before `before`, newest first: up to `at_most` of each attempt."""
    for each in active_ranges(attempts, last=before - 1):
        parameters = {"run_id": run_id, "configuration_digest": configuration_digest, "at_most": at_most}
        yield from (Snapshot(*row) for row in _SNAPSHOTS_BEFORE.rows(session, parameters | each.parameters()))


def newest_snapshot_of_run(session: Session, run_id: str) -> Snapshot | None:
    """Return the newest snapshot; those of superseded steps are dropped when an attempt starts."""
    found = _NEWEST_SNAPSHOT_OF_RUN.first(session, {"run_id": run_id})
    return None if found is None else Snapshot(*found)


def newest_steps(session: Session, run_ids: Collection[str]) -> dict[str, int]:
    """Return the step of the newest snapshot of each run that has one."""
    query = select(DetectorSnapshot.run_id, func.max(DetectorSnapshot.step))
    query = query.where(DetectorSnapshot.run_id.in_(run_ids)).group_by(DetectorSnapshot.run_id)
    return dict(session.execute(query).all())


def snapshots_between(session: Session, run_id: str, after: int, last: int) -> set[tuple[int, int]]:
    """Return (attempt, step) of the snapshots beyond `after` up to `last`, those of superseded steps included."""
    rows = _SNAPSHOTS_AFTER.rows(session, {"run_id": run_id, "after": after, "last": last})
    return {(row[0], row[1]) for row in rows}


def snapshot_at(session: Session, run_id: str, attempt: int, step: int) -> Snapshot | None:
    """Return the snapshot of a step of an attempt, None if there is none."""
    found = _SNAPSHOT_AT.first(session, {"run_id": run_id, "attempt": attempt, "at": step})
    return None if found is None else Snapshot(*found)


def put_snapshots(
    session: Session, run_id: str, rows: list[dict[str, Any]], obsolete: Collection[tuple[int, int]]
) -> None:
    """Insert or overwrite snapshots, and delete those that are obsolete, by (attempt, step)."""
    upsert(session, DetectorSnapshot, rows, ("run_id", "attempt", "step"))
    if obsolete:
        keys = [{"run_id": run_id, "attempt": attempt, "at": step} for attempt, step in sorted(obsolete)]
        _DROP_SNAPSHOT.run(session, *keys)


def due_replay(session: Session, run_id: str) -> Due | None:
    """Return the replay that is due; None if there is none."""
    found = _DUE.first(session, {"run_id": run_id})
    return None if found is None else Due(*found)


def runs_with_due_replay(session: Session, limit: int) -> list[str]:
    """Return up to `limit` runs that have a replay due."""
    return list(session.scalars(select(DueReplay.run_id).order_by(DueReplay.run_id).limit(limit)))


def put_due_replay(session: Session, run_id: str, due: Due) -> None:
    """Note that the detectors have to be replayed."""
    upsert(session, DueReplay, [{"run_id": run_id, **due._asdict()}], ("run_id",))


def drop_due_replay(session: Session, run_id: str) -> None:
    """Note that no replay is due."""
    _DROP_DUE.run(session, {"run_id": run_id})


def drop_snapshots(session: Session, run_id: str, from_step: int) -> None:
    """Delete the snapshots from `from_step` on, those of superseded steps included."""
    _DROP_SNAPSHOTS.run(session, {"run_id": run_id, "from_step": from_step})


def store_snapshots(session: Session, run_id: str, rows: list[dict[str, Any]], keep: int) -> None:
    """Insert snapshots of steps that have none; delete all but the milestones and the run's newest `keep` snapshots.

    Usually one comes and one goes. The old row is then overwritten, which leaves PostgreSQL less to vacuum.
    """
    passed = _PASSED.rows(session, {"run_id": run_id, "others_kept": keep - 2}) if len(rows) == 1 else []
    if len(passed) == 1:
        (attempt, step), new = passed[0], {f"new_{name}": rows[0][name] for name in Snapshot._fields}
        _REPLACE_SNAPSHOT.run(session, {"run_id": run_id, "old_attempt": attempt, "old_step": step, **new})
        return
    insert_rows(session, DetectorSnapshot, rows)
    _DROP_PASSING_SNAPSHOTS.run(session, {"run_id": run_id, "others_kept": keep - 1})


def scalar_tail(session: Session, run_id: str) -> ScalarTail | None:
    """Return the newest step with scalars of a run without rollouts; None before any."""
    return session.get(ScalarTail, run_id)


def runs_with_due_scalar_tail(session: Session, before_us: int, limit: int) -> list[str]:
    """Return up to `limit` runs whose newest scalars are older than that, or which have ended, and are still open."""
    query = (
        select(ScalarTail.run_id)
        .join(Run, Run.id == ScalarTail.run_id)
        .where(
            ScalarTail.closed.is_(False),
            Run.deleted_at_us.is_(None),
            or_(ScalarTail.received_at_us < before_us, Run.state.in_(("finished", "failed"))),
        )
    )
    return list(session.scalars(query.order_by(ScalarTail.run_id).limit(limit)))
