"""The exporter's queries: a constant number for any number of runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, func, select, true
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW
from foreshock_service.platform.database.tables import (
    AdviceAcknowledgement,
    Alert,
    Attempt,
    Attribution,
    Lease,
    NewestMeasurement,
    Probe,
    ProbeJob,
    Run,
    Step,
    measurements,
)
from foreshock_service.replay.probes.jobs import FAILURES, JobState

# Shown for jobs that any worker may do.
ANY_ACCELERATOR = "any"


def runs_by_state(session: Session, project: str | None) -> Mapping[str, int]:
    """Return the number of runs in each state."""
    query = select(Run.state, func.count()).where(_visible(project)).group_by(Run.state)
    return dict(session.execute(query).all())


def active_runs(session: Session, project: str | None, limit: int) -> Sequence[Run]:
    """Return up to `limit` running runs, those with the newest data first."""
    newest = func.coalesce(Run.last_shard_at_us, Run.created_at_us)
    query = select(Run).where(_visible(project), Run.state == "running").order_by(newest.desc(), Run.id)
    return session.scalars(query.limit(limit)).all()


def newest_closed_steps(session: Session, run_ids: Collection[str]) -> Sequence[tuple[str, int, int, int]]:
    """Return (run_id, step, received_shards, expected_shards) of the newest closed step of each run."""
    newest = NewestMeasurement
    same = and_(Step.run_id == newest.run_id, Step.attempt == newest.attempt, Step.step == newest.step)
    query = select(Step.run_id, Step.step, Step.received_shards, Step.expected_shards).select_from(newest)
    return session.execute(
        query.join(Step, same).where(newest.run_id.in_(run_ids), newest.comparison == STEP_ROW)
    ).all()


def newest_measurements(session: Session, run_ids: Collection[str], columns: Sequence[str]) -> Sequence[Any]:
    """Return (run_id, comparison, buckets, some columns of the wide table) of the newest step of each comparison.

    Long runs have thousands of steps, few of which were replayed: `newest_measurements` names the ones to read.
    """
    table, newest = measurements.c, NewestMeasurement
    same = and_(
        table.run_id == newest.run_id,
        table.attempt == newest.attempt,
        table.step == newest.step,
        table.comparison == newest.comparison,
    )
    query = select(newest.run_id, newest.comparison, newest.buckets, *(table[name] for name in columns))
    query = query.select_from(newest).join(measurements, same).where(newest.run_id.in_(run_ids))
    return session.execute(query.order_by(newest.run_id, newest.comparison)).all()


def newest_attributions(session: Session, run_ids: Collection[str]) -> dict[str, Attribution]:
    """Return the newest attribution of each run that was computed."""
    computed = Attribution.computed_at_us.is_not(None)
    newest = (
        select(Attribution.run_id, Attribution.attempt, func.max(Attribution.step).label("step"))
        .where(Attribution.run_id.in_(run_ids), computed)
        .group_by(Attribution.run_id, Attribution.attempt)
        .subquery()
    )
    same = and_(
        Attribution.run_id == newest.c.run_id,
        Attribution.attempt == newest.c.attempt,
        Attribution.step == newest.c.step,
    )
    query = select(Attribution).join(newest, same).order_by(Attribution.attempt)
    return {each.run_id: each for each in session.scalars(query)}


def open_alerts(session: Session, run_ids: Collection[str]) -> Sequence[tuple[str, str, str, int]]:
    """Return (run, rule, severity, number) of the open alerts."""
    of_alert = (Alert.run_id, Alert.rule, Alert.severity)
    query = select(*of_alert, func.count()).where(Alert.run_id.in_(run_ids), Alert.state == "open")
    return session.execute(query.group_by(*of_alert)).all()


def runs_with_open_rule(session: Session, run_ids: Collection[str], rule: str) -> frozenset[str]:
    """Return those of the runs that have an open or acknowledged alert of this rule."""
    standing = Alert.state.in_(("open", "acknowledged"))
    return frozenset(
        session.scalars(select(Alert.run_id).where(Alert.run_id.in_(run_ids), Alert.rule == rule, standing))
    )


def newest_acknowledgements(session: Session, run_ids: Collection[str]) -> dict[str, AdviceAcknowledgement]:
    """Return the newest acknowledgement of each run's trainer."""
    table = AdviceAcknowledgement
    newest = select(table.step).where(table.run_id == Attempt.run_id, table.attempt == Attempt.attempt)
    newest = newest.order_by(table.step.desc()).limit(1).correlate(Attempt)
    same = and_(
        table.run_id == Attempt.run_id, table.attempt == Attempt.attempt, table.step == newest.scalar_subquery()
    )
    query = select(table).select_from(Attempt).join(table, same).where(Attempt.run_id.in_(run_ids))
    return {each.run_id: each for each in session.scalars(query.order_by(Attempt.attempt))}


def jobs_by_state(session: Session, project: str | None) -> Sequence[tuple[str, str, int, int]]:
    """Return (accelerator, state, number, when the oldest was queued) of probe jobs; deleted runs are left out."""
    accelerator = func.coalesce(ProbeJob.accelerator, ANY_ACCELERATOR)
    query = (
        select(accelerator, ProbeJob.state, func.count(), func.min(ProbeJob.queued_at_us))
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(_visible(project))
        .group_by(accelerator, ProbeJob.state)
    )
    return session.execute(query).all()


def failures_by_accelerator(session: Session, project: str | None) -> Mapping[str, int]:
    """Return the number of tries that failed or whose lease expired, by the accelerator of the worker."""
    query = select(Lease.accelerator, func.count()).join(ProbeJob, ProbeJob.id == Lease.job_id)
    query = query.join(Probe).join(Run, Run.id == Probe.run_id).where(Lease.outcome.in_(FAILURES))
    if project is not None:
        query = query.where(Run.project == project)
    return dict(session.execute(query.group_by(Lease.accelerator)).all())


def is_waiting(state: str) -> bool:
    """Return whether a job in this state waits for a worker."""
    return state == JobState.QUEUED


def _visible(project: str | None) -> ColumnElement[bool]:
    return Run.deleted_at_us.is_(None) & (true() if project is None else Run.project == project)
