"""Cancel a probe: its queued jobs end, and a worker that has begun one is refused from then on."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock_service.platform.audit.service import record
from foreshock_service.platform.database.dialect import database_now_us
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.probes.job_transitions import ENDED, JobState, cancel, state_of_probe
from foreshock_service.replay.probes.schemas import ProbeRead
from foreshock_service.replay.probes.service import get_probe, lock_jobs, running_leases, shown

CANCELLED = "the probe was cancelled"


class ProbeHasEnded(ProblemError):
    """The probe has ended by itself; there is nothing to cancel."""

    status = 409
    problem_type = "probe-has-ended"


def cancel_probe(session: Session, principal: Principal, probe_id: str) -> ProbeRead:
    """Skip the unfinished jobs of a probe and fence their workers off; a cancelled probe stays as it is.

    Raises ProbeNotFound, RunDeleted, ProbeHasEnded.
    """
    probe, run = get_probe(session, principal, probe_id)
    jobs = lock_jobs(session, probe_id)
    unfinished = [job for job in jobs if JobState(job.state) not in ENDED]
    state, _ = state_of_probe(jobs)
    if not unfinished and not any(job.reason == CANCELLED for job in jobs):
        raise ProbeHasEnded(f"the probe has ended as {state.value}: only a queued or running one can be cancelled")
    now, leases = database_now_us(session), running_leases(session, unfinished)
    for job in unfinished:
        cancel(job, leases.get(job.id), JobState.SKIPPED, CANCELLED, now)
    if unfinished:
        record(
            session, principal, "probe.cancel", probe.id, project=run.project, run_id=run.id,
            before={"state": state.value}, after={"step": probe.step, "jobs": len(unfinished)},
        )  # fmt: skip
    session.flush()
    return shown(session, run, probe)
