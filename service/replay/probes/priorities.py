"""Set the priorities of probes: requested ones, and those of steps near an open alert."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.orm import Session

from foreshock_service.platform.audit.service import record
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob
from foreshock_service.platform.security import Principal
from foreshock_service.replay.probes import repository
from foreshock_service.replay.probes.job_ranks import Priority, set_priority
from foreshock_service.replay.probes.job_transitions import JobState

_RAISED_AT_ONCE = 100


def default_priority(session: Session, run_id: str, step: int) -> Priority:
    """Return the priority of a probe that was requested without one."""
    near = repository.is_step_near_open_alert(session, run_id, step)
    return Priority.URGENT if near else Priority.NORMAL


def change_priority(
    session: Session, principal: Principal, run: Run, probe: Probe, jobs: Iterable[ProbeJob], priority: Priority
) -> None:
    """Set the priority that an equal, later request asks for; running and ended jobs keep their place."""
    before, probe.priority = probe.priority, priority
    for job in jobs:
        if job.state == JobState.QUEUED:
            set_priority(job, priority)
    record(
        session, principal, "probe.priority", probe.id, project=run.project, run_id=run.id,
        before={"priority": before}, after={"priority": priority},
    )  # fmt: skip
    session.flush()


def raise_jobs_near_alerts(context: ServiceContext) -> int:
    """Make queued jobs of steps near an open alert urgent, unless their priority was requested; return their number."""
    with context.database.read() as session:
        if not repository.has_jobs_to_raise(session, Priority.URGENT):
            return 0
    return context.database.write(_raise)


def _raise(session: Session) -> int:
    jobs = repository.jobs_to_raise(session, Priority.URGENT, _RAISED_AT_ONCE)
    for job in jobs:
        set_priority(job, Priority.URGENT)
    session.flush()
    return len(jobs)
