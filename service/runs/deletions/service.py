"""Request deletions of rollouts and read how far they are.

A deletion stays in force: a shard that arrives later makes it search that shard's step again.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, case, or_, select, tuple_, update
from sqlalchemy.orm import Session

from foreshock.api.runs import DeletionRecord
from foreshock.clock import now_us
from foreshock_service.platform.audit.service import record
from foreshock_service.platform.database.tables import Deletion
from foreshock_service.platform.identifiers import new_identifier
from foreshock_service.platform.pagination import Page, decode_cursor, page_of
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.platform.security import Principal
from foreshock_service.runs.deletions.deleted_ids import DeletedIds
from foreshock_service.runs.deletions.schemas import DeletionCreate
from foreshock_service.runs.runs.service import get_run, lock_run
from foreshock_service.runs.step_key import StepKey


def request_deletion(session: Session, principal: Principal, run_id: str, body: DeletionCreate) -> Deletion:
    """Store the request; the rollouts go in the background. Raises InvalidRequest without an id, RunDeleted."""
    if not body.sample_ids and not body.group_ids:
        raise InvalidRequest("body: name at least one id in sample_ids or group_ids")
    run = lock_run(session, principal, run_id)
    ids = DeletedIds.of(run_id, body.sample_ids, body.group_ids)
    run.deletions += 1
    deletion = Deletion(
        id=new_identifier("deletion"), run_id=run_id, sample_digests=sorted(ids.samples),
        group_digests=sorted(ids.groups), attempt=0, step=-1, steps=0, rollouts=0, files=0, requested_at_us=now_us(),
        finished_at_us=None,
    )  # fmt: skip
    session.add(deletion)
    asked = {"sample_ids": len(ids.samples), "group_ids": len(ids.groups)}
    record(session, principal, "rollouts.delete", deletion.id, project=run.project, run_id=run_id, after=asked)
    session.flush()
    return deletion


def deletions_of_run(
    session: Session, principal: Principal, run_id: str, cursor: str | None, limit: int
) -> Page[DeletionRecord]:
    """Return one page of a run's deletions, newest first. Raises RunNotFound, RunDeleted, InvalidCursor."""
    get_run(session, principal, run_id)
    keys = (Deletion.requested_at_us, Deletion.id)
    query = select(Deletion).where(Deletion.run_id == run_id).order_by(*(key.desc() for key in keys))
    if cursor is not None:
        query = query.where(tuple_(*keys) < tuple_(*decode_cursor(cursor, (int, str))))
    found = [deletion_record(row) for row in session.scalars(query.limit(limit + 1))]
    return page_of(found, limit, lambda each: (each.requested_at_us, each.id))


def deletion_record(row: Deletion) -> DeletionRecord:
    """Return a deletion as it is shown."""
    return DeletionRecord(
        id=row.id, state="running" if row.finished_at_us is None else "done", sample_ids=len(row.sample_digests),
        group_ids=len(row.group_digests), steps=row.steps, rollouts=row.rollouts, files=row.files,
        requested_at_us=row.requested_at_us, finished_at_us=row.finished_at_us,
    )  # fmt: skip


def search_step_again(session: Session, key: StepKey) -> None:
    """Make the deletions of the run search a step again that got rollouts. The run is locked."""
    beyond: ColumnElement[bool] = or_(
        Deletion.attempt > key.attempt, (Deletion.attempt == key.attempt) & (Deletion.step > key.step - 1)
    )
    session.execute(
        update(Deletion)
        .where(Deletion.run_id == key.run_id)
        .values(
            finished_at_us=None,
            step=case((beyond, key.step - 1), else_=Deletion.step),
            attempt=case((beyond, key.attempt), else_=Deletion.attempt),
        )
    )
