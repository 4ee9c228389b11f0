"""Queries on the steps whose tokens retention may purge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, and_, delete, exists, or_, select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import (
    Alert,
    Attribution,
    ExactShard,
    Probe,
    ProbeJob,
    Run,
    ScoreShard,
    Shard,
    Step,
)
from foreshock_service.replay.probes.jobs import ENDED
from foreshock_service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as retention sees it; `retention` has its own rules."""

    id: str
    project: str
    key: str
    retention: dict[str, Any] | None


def runs(session: Session, run_id: str | None) -> list[RunRow]:
    """Return the runs that are not deleted, or one of them, oldest first."""
    query = select(Run.id, Run.project, Run.key, Run.retention).where(Run.deleted_at_us.is_(None))
    if run_id is not None:
        query = query.where(Run.id == run_id)
    return [RunRow(*row) for row in session.execute(query.order_by(Run.created_at_us, Run.id))]


def newest_step(session: Session, run_id: str) -> int | None:
    """Return the newest step of the run's active history: that of its newest attempt with rollouts."""
    query = select(Step.step).where(Step.run_id == run_id)
    return session.scalar(query.order_by(Step.attempt.desc(), Step.step.desc()).limit(1))


def settled_steps(session: Session, run_id: str, up_to: int, after: tuple[int, int], limit: int) -> list[StepKey]:
    """Return up to `limit` steps beyond `after` (attempt, step) that have tokens and wait for nothing.

    Open steps, those with shards to fold, unfinished jobs or an attribution to compute are left out.
    """
    probed = exists().where(
        Probe.run_id == Step.run_id,
        Probe.attempt == Step.attempt,
        Probe.step == Step.step,
        ProbeJob.probe_id == Probe.id,
        ProbeJob.state.not_in(sorted(ENDED)),
    )
    attributed = exists().where(
        Attribution.run_id == Step.run_id,
        Attribution.attempt == Step.attempt,
        Attribution.step == Step.step,
        Attribution.stale,
    )
    query = select(Step.run_id, Step.attempt, Step.step).where(
        Step.run_id == run_id,
        Step.step <= up_to,
        or_(Step.attempt > after[0], and_(Step.attempt == after[0], Step.step > after[1])),
        Step.closed_at_us.is_not(None),
        Step.folded_shards >= Step.received_shards,
        Step.tokens_purged_at_us.is_(None),
        ~probed,
        ~attributed,
    )
    rows = session.execute(query.order_by(Step.attempt, Step.step).limit(limit))
    return [StepKey(*row) for row in rows]


def alert_steps(session: Session, run_id: str) -> set[int]:
    """Return the steps at which alerts of the run fired, but those that were retracted."""
    query = select(Alert.step).where(Alert.run_id == run_id, Alert.state != "retracted")
    return set(session.scalars(query.distinct()))


def files_of_step(session: Session, key: StepKey) -> list[tuple[str, int]]:
    """Return name and bytes of every file of a step: rollouts, scores and exact divergences."""
    own = select(Shard.file, Shard.file_bytes).where(
        Shard.run_id == key.run_id, Shard.attempt == key.attempt, Shard.step == key.step, Shard.tokens_removed.is_(None)
    )
    found = [(name, size) for name, size in session.execute(own)]
    for table in (ScoreShard, ExactShard):
        of_jobs = select(table.file, table.body_bytes).where(table.job_id.in_(_jobs_of(key)))
        found += [(name, size) for name, size in session.execute(of_jobs)]
    return sorted(set(found))


def is_settled(session: Session, key: StepKey) -> bool:
    """Return whether the step may still be purged, as `settled_steps` has it."""
    return key in settled_steps(session, key.run_id, key.step, (key.attempt, key.step - 1), 1)


def mark_purged(session: Session, key: StepKey, at_us: int) -> None:
    """Mark the tokens of a step as purged: its shards keep their rows, its scores and exact divergences theirs."""
    of_step = (Shard.run_id == key.run_id, Shard.attempt == key.attempt, Shard.step == key.step)
    session.execute(
        update(Shard)
        .where(*of_step, Shard.tokens_removed.is_(None))
        .values(
            tokens_removed="retention", tokens_changed_at_us=at_us, full_rollouts=0, full_tokens=0, sampled_rollouts=0
        )
    )
    session.execute(
        update(Step)
        .where(Step.run_id == key.run_id, Step.attempt == key.attempt, Step.step == key.step)
        .values(tokens_purged_at_us=at_us, full_rollouts=0, full_tokens=0)
    )
    for table in (ScoreShard, ExactShard):
        session.execute(delete(table).where(table.job_id.in_(_jobs_of(key))))


def _jobs_of(key: StepKey) -> Select[str]:
    query = select(ProbeJob.id).join(Probe, Probe.id == ProbeJob.probe_id)
    return query.where(Probe.run_id == key.run_id, Probe.attempt == key.attempt, Probe.step == key.step)
