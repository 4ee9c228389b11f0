"""End the jobs whose rollouts were deleted or purged; their workers get LeaseLost and drop the work."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import database_now_us
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob
from foreshock_service.replay.probes.job_transitions import ENDED, JobState, cancel
from foreshock_service.runs.events import RunRemoved
from foreshock_service.runs.step_key import StepKey


def cancel_jobs_of_run(session: Session, removed: RunRemoved) -> None:
    """Skip the unfinished jobs of a deleted run."""
    _cancel(session, Probe.run_id == removed.run_id, "the run was deleted")


def cancel_jobs_of_step(session: Session, key: StepKey, reason: str) -> None:
    """Skip the unfinished jobs of a step whose tokens are no longer all there."""
    of_step = (Probe.run_id == key.run_id) & (Probe.attempt == key.attempt) & (Probe.step == key.step)
    _cancel(session, of_step, reason)


def _cancel(session: Session, of_probes: ColumnElement[bool], reason: str) -> None:
    query = select(ProbeJob).join(Probe, Probe.id == ProbeJob.probe_id)
    query = query.where(of_probes, ProbeJob.state.not_in(sorted(ENDED))).order_by(ProbeJob.id)
    jobs: Sequence[ProbeJob] = session.scalars(query.with_for_update(of=ProbeJob)).all()
    now = database_now_us(session)
    for job in jobs:
        lease = session.get(Lease, job.lease_id) if job.lease_id is not None else None
        cancel(job, lease, JobState.SKIPPED, reason, now)
