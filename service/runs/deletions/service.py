"""Request deletions of rollouts and read how far they are.

A deletion stays in force: a shard that arrives later makes it search that shard's step again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, case, or_, select, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.audit.service import record
from service.platform.database.tables import Deletion
from service.platform.identifiers import new_identifier
from service.platform.problem import InvalidRequest
from service.platform.security import Principal
from service.runs.deletions.deleted_ids import DeletedIds
from service.runs.deletions.schemas import DeletionCreate
from service.runs.runs.service import get_run, lock_run
from service.runs.step_key import StepKey


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


def deletions_of_run(session: Session, principal: Principal, run_id: str, limit: int) -> Sequence[Deletion]:
    """Return the newest deletions of a run. Raises RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    query = select(Deletion).where(Deletion.run_id == run_id).order_by(Deletion.requested_at_us.desc(), Deletion.id)
    return session.scalars(query.limit(limit)).all()


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
