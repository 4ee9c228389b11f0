"""Queries on probe policies, the steps that they choose, and the time that probes took."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, distinct, func, or_, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.tables import Checkpoint, PolicyProbe, ProbePolicy, Run, Step
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob
from foreshock_service.replay.probes.jobs import JobState
from foreshock_service.replay.probes.repository import is_near_open_alert
from foreshock_service.runs.active_steps import AttemptStart, active_attempt_of, is_active
from foreshock_service.runs.events import StepKey


def find(session: Session, run_id: str) -> ProbePolicy | None:
    """Return the policy of a run."""
    return session.get(ProbePolicy, run_id)


def runs_with_policy(session: Session) -> Sequence[str]:
    """Return the ids of the runs with a policy that are not deleted."""
    query = select(ProbePolicy.run_id).join(Run, Run.id == ProbePolicy.run_id)
    return session.scalars(query.where(Run.deleted_at_us.is_(None)).order_by(ProbePolicy.run_id)).all()


def spent_us(session: Session, run_id: str, now_us: int) -> int:
    """Return the time for which workers held the jobs of the run's probes; running leases count until now."""
    held = func.coalesce(Lease.ended_at_us, now_us) - Lease.granted_at_us
    query = (
        select(func.sum(held)).join(ProbeJob, ProbeJob.id == Lease.job_id).join(Probe, Probe.id == ProbeJob.probe_id)
    )
    return int(session.scalar(query.where(Probe.run_id == run_id)) or 0)


def counts(session: Session, run_id: str) -> tuple[int, int]:
    """Return the number of steps that the policy probed, and of those that could not be."""
    query = select(func.count(PolicyProbe.probe_id), func.count()).where(PolicyProbe.run_id == run_id)
    made, chosen = session.execute(query).one()
    return made, chosen - made


def unfinished(session: Session, run_id: str) -> int:
    """Return the number of automatic probes of the run that have not ended."""
    query = select(func.count(distinct(PolicyProbe.probe_id))).join(ProbeJob, ProbeJob.probe_id == PolicyProbe.probe_id)
    query = query.where(PolicyProbe.run_id == run_id, ProbeJob.state.in_((JobState.QUEUED, JobState.RUNNING)))
    return session.scalar(query) or 0


def queued_probes(session: Session, run_id: str) -> Sequence[PolicyProbe]:
    """Return the automatic probes of the run with queued jobs, those that the budget ended before left out."""
    queued = select(ProbeJob.id).where(ProbeJob.probe_id == PolicyProbe.probe_id, ProbeJob.state == JobState.QUEUED)
    query = select(PolicyProbe).where(PolicyProbe.run_id == run_id, PolicyProbe.problem.is_(None), queued.exists())
    return session.scalars(query.order_by(PolicyProbe.step)).all()


def steps_near_alerts(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], now_us: int, limit: int
) -> Sequence[StepKey]:
    """Return the first steps near an open alert that can be probed and were not."""
    near = is_near_open_alert(run_id, Checkpoint.step)
    query = select(Checkpoint.attempt, Checkpoint.step).where(_possible(run_id, attempts, now_us), near)
    return [StepKey(run_id, *row) for row in session.execute(query.order_by(Checkpoint.step).limit(limit))]


def steps_by_interval(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], every: int, now_us: int, limit: int
) -> Sequence[StepKey]:
    """Return the first step that can be probed of each `every` steps without an automatic probe."""
    probed = select(PolicyProbe.step).where(
        PolicyProbe.run_id == run_id,
        PolicyProbe.probe_id.is_not(None),
        is_active(attempts, PolicyProbe.attempt, PolicyProbe.step),
        PolicyProbe.step // every == Checkpoint.step // every,
    )
    # A step is active in one attempt only.
    first = func.min(Checkpoint.step)
    query = select(first).where(_possible(run_id, attempts, now_us), ~probed.exists())
    steps = session.scalars(query.group_by(Checkpoint.step // every).order_by(first).limit(limit))
    found = ((active_attempt_of(attempts, step), step) for step in steps)
    return [StepKey(run_id, attempt, step) for attempt, step in found if attempt is not None]


def add(session: Session, key: StepKey, cause: str, probe_id: str | None, problem: str | None, now_us: int) -> bool:
    """Record the automatic probe of a step; return whether the step had none."""
    row = {
        "run_id": key.run_id,
        "attempt": key.attempt,
        "step": key.step,
        "cause": cause,
        "probe_id": probe_id,
        "problem": problem,
        "made_at_us": now_us,
    }
    return insert_if_absent(session, PolicyProbe, row)


def _possible(run_id: str, attempts: Sequence[AttemptStart], now_us: int) -> ColumnElement[bool]:
    """Return the condition for checkpoints of closed, active steps without an automatic probe."""
    closed = select(Step.step).where(
        Step.run_id == run_id,
        Step.attempt == Checkpoint.attempt,
        Step.step == Checkpoint.step,
        Step.closed_at_us.is_not(None),
    )
    chosen = select(PolicyProbe.step).where(
        PolicyProbe.run_id == run_id,
        PolicyProbe.attempt == Checkpoint.attempt,
        PolicyProbe.step == Checkpoint.step,
    )
    return and_(
        Checkpoint.run_id == run_id,
        is_active(attempts, Checkpoint.attempt, Checkpoint.step),
        or_(Checkpoint.expires_at_us.is_(None), Checkpoint.expires_at_us > now_us),
        closed.exists(),
        ~chosen.exists(),
    )
