"""Queries on probes and their jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Alert, Checkpoint, Run
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob
from foreshock_service.replay.probes.jobs import JobState, Priority
from foreshock_service.runs.active_steps import AttemptStart, is_active
from foreshock_service.runs.events import StepKey


def find_by_request(session: Session, run_id: str, request_digest: str) -> Probe | None:
    """Return the probe of an equal request."""
    return session.scalar(select(Probe).where(Probe.run_id == run_id, Probe.request_digest == request_digest))


def newest(
    session: Session, conditions: Iterable[ColumnElement[bool]], after: tuple[int, str] | None, limit: int
) -> Sequence[Probe]:
    """Return up to `limit` probes, newest first, older than `after` (created_at_us, id)."""
    query = select(Probe).join(Run, Run.id == Probe.run_id).where(*conditions)
    if after is not None:
        query = query.where(tuple_(Probe.created_at_us, Probe.id) < after)
    return session.scalars(query.order_by(Probe.created_at_us.desc(), Probe.id.desc()).limit(limit)).all()


def jobs_of(session: Session, probe_ids: Iterable[str]) -> dict[str, list[ProbeJob]]:
    """Return the jobs of each probe, ordered by engine."""
    query = select(ProbeJob).where(ProbeJob.probe_id.in_(list(probe_ids))).order_by(ProbeJob.engine)
    jobs: dict[str, list[ProbeJob]] = defaultdict(list)
    for job in session.scalars(query):
        jobs[job.probe_id].append(job)
    return jobs


def earlier_checkpoints(session: Session, attempts: Sequence[AttemptStart], key: StepKey) -> Sequence[Checkpoint]:
    """Return the checkpoints announced for steps before `key.step` that led to it, by step."""
    led = [each for each in attempts if each.attempt <= key.attempt]
    chosen = is_active(led, Checkpoint.attempt, Checkpoint.step, 0, key.step - 1)
    query = select(Checkpoint).where(Checkpoint.run_id == key.run_id, chosen, Checkpoint.step < key.step)
    return session.scalars(query.order_by(Checkpoint.step)).all()


def find_checkpoint(session: Session, run_id: str, attempt: int, step: int) -> Checkpoint | None:
    """Return the checkpoint that was announced for a step."""
    return session.get(Checkpoint, (run_id, attempt, step))


def newest_checkpoints(session: Session, run_id: str, attempt: int, most: int) -> list[int]:
    """Return the newest announced steps of an attempt, at most `most` of them, in order."""
    query = select(Checkpoint.step).where(Checkpoint.run_id == run_id, Checkpoint.attempt == attempt)
    return sorted(session.scalars(query.order_by(Checkpoint.step.desc()).limit(most)))


def is_step_near_open_alert(session: Session, run_id: str, step: int) -> bool:
    """Return whether the run has an open alert near the step."""
    return bool(session.scalar(select(is_near_open_alert(run_id, step))))


def jobs_to_raise(session: Session, limit: int, *, locked: bool = False) -> Sequence[ProbeJob]:
    """Return up to `limit` queued jobs near an open alert that are not urgent, of probes that ask for no priority."""
    query = (
        select(ProbeJob)
        .join(Probe)
        .where(
            ProbeJob.state == JobState.QUEUED,
            ProbeJob.priority != Priority.URGENT,
            Probe.priority.is_(None),
            is_near_open_alert(Probe.run_id, Probe.step),
        )
        .order_by(ProbeJob.id)
        .limit(limit)
    )
    if locked:
        query = query.with_for_update(skip_locked=True, of=ProbeJob).execution_options(populate_existing=True)
    return session.scalars(query).all()


ALERT_WINDOW_STEPS = 10
"""Steps before and after an alert's own step that are near it. In an alarm, weights are wanted every ten steps."""


def is_near_open_alert(run_id: Any, step: Any) -> ColumnElement[bool]:
    """Return the condition for a step near an open or acknowledged alert of its run, given values or columns."""
    near = Alert.step.between(step - ALERT_WINDOW_STEPS, step + ALERT_WINDOW_STEPS)
    return select(Alert.id).where(Alert.run_id == run_id, Alert.state.in_(("open", "acknowledged")), near).exists()
