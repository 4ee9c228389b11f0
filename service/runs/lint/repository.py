"""Queries on the evidence of shards and the verdicts on steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.engine import insert_rows, upsert
from foreshock_service.platform.database.tables import Scalar, ShardLint, StepLint
from foreshock_service.runs.active_steps import AttemptStart, is_active
from foreshock_service.runs.events import StepKey

STEP_KEY = ("run_id", "attempt", "step")
SHARD_KEY = (*STEP_KEY, "shard")


@dataclass(frozen=True, slots=True)
class WarnedStep:
    """Step with lint warnings: the severity of each warning by its name."""

    step: int
    warnings: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunSums:
    """Sums over the checked steps of a run. `square_excess` is Σ (surprisal − entropy)² over steps."""

    steps: int
    clean_steps: int
    tested_steps: int
    tokens: int
    surprisal: float
    entropy: float
    variance: float
    largest: float
    square_excess: float


def add_evidence(session: Session, row: dict[str, Any]) -> None:
    """Add the evidence of a shard."""
    insert_rows(session, ShardLint, [row])


def replace_evidence(session: Session, row: dict[str, Any]) -> None:
    """Replace the evidence of a shard, or add it if there is none."""
    upsert(session, ShardLint, [row], SHARD_KEY)


def evidence_of_step(session: Session, key: StepKey) -> Sequence[ShardLint]:
    """Return the evidence of a step's shards, in order."""
    query = select(ShardLint).where(
        ShardLint.run_id == key.run_id, ShardLint.attempt == key.attempt, ShardLint.step == key.step
    )
    return session.scalars(query.order_by(ShardLint.shard)).all()


def newest_steps(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], attempt: int | None, count: int
) -> list[StepKey]:
    """Return the newest checked steps, ascending: the active ones, or those of one attempt."""
    query = select(StepLint.run_id, StepLint.attempt, StepLint.step).where(
        StepLint.run_id == run_id, _chosen(attempts, attempt)
    )
    rows = session.execute(query.order_by(StepLint.step.desc(), StepLint.attempt.desc()).limit(count))
    return [StepKey(*row) for row in rows][::-1]


def scalars_of_step(session: Session, key: StepKey, names: Sequence[str]) -> dict[str, float]:
    """Return the finite scalars of these names, each from the source `trainer`, else the first by name.

    A query of its own: the scalars know the steps, which know the lint.
    """
    query = select(Scalar.name, Scalar.value).where(
        Scalar.run_id == key.run_id,
        Scalar.attempt == key.attempt,
        Scalar.step == key.step,
        Scalar.name.in_(names),
    )
    values: dict[str, float] = {}
    for name, value in session.execute(query.order_by(Scalar.source != "trainer", Scalar.source)):
        if value is not None:
            values.setdefault(name, value)
    return values


def put_verdict(session: Session, row: dict[str, Any]) -> None:
    """Store the verdict on a step, or overwrite an older one."""
    upsert(session, StepLint, [row], STEP_KEY)


def verdict_of(session: Session, key: StepKey) -> StepLint | None:
    """Return the verdict on a step."""
    return session.get(StepLint, key)


def warnings_of(session: Session, key: StepKey) -> dict[str, str]:
    """Return the severity of each warning of a step by its name; empty if the step has no verdict."""
    query = select(StepLint.warnings).filter_by(**key._asdict())
    return session.scalar(query) or {}


def warned_steps(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], attempt: int | None, *, infos: bool = False
) -> list[WarnedStep]:
    """Return the steps with warnings, in order: the active ones, or those of one attempt; `infos`: with these too."""
    query = select(StepLint.step, StepLint.warnings).where(StepLint.run_id == run_id, _chosen(attempts, attempt))
    if not infos:
        query = query.where(StepLint.severity.is_not(None))
    found = (
        WarnedStep(step, {name: severity for name, severity in warnings.items() if infos or severity != "info"})
        for step, warnings in session.execute(query.order_by(StepLint.step))
    )
    return [step for step in found if step.warnings]


def run_sums(session: Session, run_id: str, attempts: Sequence[AttemptStart], attempt: int | None) -> RunSums:
    """Return the sums over the active steps, or over those of one attempt."""
    excess = StepLint.surprisal - StepLint.entropy
    query = select(
        func.count(),
        func.count().filter(StepLint.severity.is_(None)),
        func.count().filter(StepLint.surprisal_tokens > 0),
        func.coalesce(func.sum(StepLint.surprisal_tokens), 0),
        func.sum(StepLint.surprisal),
        func.sum(StepLint.entropy),
        func.sum(StepLint.surprisal_variance),
        func.max(StepLint.largest_surprisal),
        func.sum(excess * excess),
    ).where(StepLint.run_id == run_id, _chosen(attempts, attempt))
    steps, clean, tested, tokens, *sums = session.execute(query).one()
    numbers = [math.nan if value is None else float(value) for value in sums]
    return RunSums(int(steps), int(clean), int(tested), int(tokens), *numbers)


def _chosen(attempts: Sequence[AttemptStart], attempt: int | None) -> ColumnElement[bool]:
    if attempt is not None:
        return StepLint.attempt == attempt
    return is_active(attempts, StepLint.attempt, StepLint.step)
