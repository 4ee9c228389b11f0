"""Queries of what the diagnosis of a run reads: alerts, findings, and steps that wait for shards."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, case, func, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import (
    Alert,
    DetectorSnapshot,
    Run,
    Step,
    StoredDiagnosis,
    StoredFinding,
)

_MOST_ALERTS = 100

# Built once: they are executed at each step.
_STANDING = Alert.state.in_(("open", "acknowledged"))
_ALERTS = (
    select(
        Alert.rule, Alert.severity, Alert.step, _STANDING, Alert.why, Alert.what_to_do, Alert.value, Alert.threshold,
        Alert.evidence, Alert.attempt,
    )
    .where(Alert.run_id == bindparam("run_id"), Alert.state != "retracted")
    .order_by(case((_STANDING, 0), else_=1), Alert.step.desc(), Alert.rule)
    .limit(_MOST_ALERTS)
)  # fmt: skip
_OBSERVED = select(func.max(DetectorSnapshot.step)).where(DetectorSnapshot.run_id == bindparam("run_id"))
_FINDINGS = select(
    StoredFinding.source, StoredFinding.name, StoredFinding.title, StoredFinding.sentence, StoredFinding.remedy,
    StoredFinding.severity, StoredFinding.steps, StoredFinding.first_step, StoredFinding.newest_step,
).where(StoredFinding.run_id == bindparam("run_id"))  # fmt: skip
_AWAITED = (
    select(Step.attempt, Step.step, Step.expected_shards, Step.last_shard_at_us)
    .where(
        # As an expression, so that the few rows of the index `ix_steps_unfolded`, whose condition is the next one, are
        # read and not all steps of the run.
        Step.run_id + "" == bindparam("run_id"),
        Step.folded_shards < Step.received_shards,
        Step.closed_at_us.is_(None),
        Step.received_shards < Step.expected_shards,
        Step.last_shard_at_us < bindparam("before_us"),
    )
    .order_by(Step.step)
)


def alerts(session: Session, run_id: str) -> list[tuple[Any, ...]]:
    """Return the alerts of a run that were not retracted: the standing ones, then the newest others."""
    return [tuple(row) for row in session.execute(_ALERTS, {"run_id": run_id})]


def observed_step(session: Session, run_id: str) -> int | None:
    """Return the newest step that the detectors have seen."""
    return session.scalar(_OBSERVED, {"run_id": run_id})


def findings(session: Session, run_id: str) -> list[tuple[Any, ...]]:
    """Return what the lint and the attributions have found."""
    return [tuple(row) for row in session.execute(_FINDINGS, {"run_id": run_id})]


def waiting_steps(session: Session, run_id: str, before_us: int) -> list[tuple[Any, ...]]:
    """Return attempt, step, expected shards and arrival of the steps whose newest shard arrived before then."""
    return [tuple(row) for row in session.execute(_AWAITED, {"run_id": run_id, "before_us": before_us})]


def runs_waiting(session: Session, before_us: int, limit: int) -> Sequence[str]:
    """Return runs with a step that waits since before then for shards which their diagnosis does not name yet."""
    query = (
        select(Step.run_id)
        .join(Run, Run.id == Step.run_id)
        .join(StoredDiagnosis, StoredDiagnosis.run_id == Step.run_id)
        .where(Step.folded_shards < Step.received_shards, Step.closed_at_us.is_(None))
        .where(Step.received_shards < Step.expected_shards, Step.last_shard_at_us < before_us)
        .where(Run.deleted_at_us.is_(None), StoredDiagnosis.awaits_shards.is_(False))
    )
    return session.scalars(query.distinct().limit(limit)).all()
