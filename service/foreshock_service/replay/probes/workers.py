"""Hardware: the workers, when they were last seen, and the jobs of each accelerator.

Times are the database's, in microseconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select, true, update
from sqlalchemy.orm import Session

from foreshock.api import probes, records
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.tables import Probe, ProbeJob, Run, Worker
from foreshock_service.replay.probes.jobs import LIVE_MINUTES

router = parameters.api_router(prefix="/v1", tags=["hardware"])

ANY_ACCELERATOR = "any"
"""The accelerator shown for jobs that any worker may do."""
_MOST_WORKERS = 500


@router.get("/hardware")
def read_hardware(context: Context, principal: security.Reader) -> probes.HardwareRecord:
    """Return the workers that may work for the key's project, the one seen last first."""
    with context.database.read() as session:
        offering = select(Worker).where(_works_for(principal.project))
        workers = session.scalars(offering.order_by(Worker.last_seen_at_us.desc(), Worker.name).limit(_MOST_WORKERS))
        return probes.HardwareRecord(
            workers=tuple(records.from_attributes(probes.WorkerRecord, each) for each in workers)
        )


def record_worker(session: Session, project: str, name: str, now_us: int, **offered: Any) -> None:
    """Add a worker, or update when it was last seen and what it offers: the other columns of its row."""
    key, seen = {"project": project, "name": name}, {**offered, "last_seen_at_us": now_us}
    if not insert_if_absent(session, Worker, {**key, **seen, "first_seen_at_us": now_us}):
        session.execute(update(Worker).filter_by(**key).values(**seen))


def live_workers(session: Session, project: str | None, now_us: int) -> Sequence[Worker]:
    """Return the live workers that may work for the project; None: the live workers of all projects."""
    query = select(Worker).where(_works_for(project), _is_live(now_us))
    return session.scalars(query.order_by(Worker.project, Worker.name)).all()


def count_live_workers(session: Session, project: str | None, now_us: int) -> Mapping[str, int]:
    """Return the number of live workers by accelerator."""
    query = select(Worker.accelerator, func.count()).where(_works_for(project), _is_live(now_us))
    return dict(session.execute(query.group_by(Worker.accelerator)).all())


def _works_for(project: str | None) -> ColumnElement[bool]:
    """A worker whose key is bound to no project works for all."""
    return true() if project is None else Worker.project.in_(("", project))


def _is_live(now_us: int) -> ColumnElement[bool]:
    return Worker.last_seen_at_us >= now_us - LIVE_MINUTES * 60_000_000


def jobs_by_state(session: Session, project: str | None) -> Sequence[tuple[str, str, int, int]]:
    """Return (accelerator, state, number, queueing time of the oldest) of probe jobs, without those of deleted runs."""
    accelerator = func.coalesce(ProbeJob.accelerator, ANY_ACCELERATOR)
    query = (
        select(accelerator, ProbeJob.state, func.count(), func.min(ProbeJob.queued_at_us))
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(is_visible(project))
        .group_by(accelerator, ProbeJob.state)
    )
    return session.execute(query).all()


def is_visible(project: str | None) -> ColumnElement[bool]:
    """Return the condition for runs of a project (None: of any) that are not deleted."""
    return Run.deleted_at_us.is_(None) & (true() if project is None else Run.project == project)
