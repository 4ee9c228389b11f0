"""Coverage: how many rollouts of a step are stored in full, and what the answers about a step rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api.runs import Coverage, IncompleteStep, OfStep, StatisticsStep
from foreshock_service.platform.database.tables import Step
from foreshock_service.runs.attempts.active_attempts import AttemptStart, is_active
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.step_key import StepKey

_MOST_STEPS = 1000
Answer = TypeVar("Answer", bound=OfStep)


def coverage_in_words(rollouts: int, full_rollouts: int) -> str:
    """Return what the measures of a step rest on."""
    if full_rollouts >= rollouts:
        return "all tokens"
    return f"all tokens, in statistics; {full_rollouts:,} of {rollouts:,} rollouts in full"


def coverage_of_step(session: Session, key: StepKey, used: int | None = None) -> Coverage:
    """Return what an answer about a step rests on: `used` of its rollouts; None: those that are stored in full."""
    step = session.get(Step, tuple(key))
    rollouts = 0 if step is None else step.rollouts
    full = rollouts if step is None or step.full_rollouts is None else step.full_rollouts
    used = full if used is None else used
    whole = used >= rollouts
    return Coverage(
        rests_on="all tokens" if whole else "some rollouts",
        rollouts=rollouts,
        used_rollouts=used,
        full_rollouts=full,
        text=coverage_in_words(rollouts, full) if whole else f"{used:,} of {rollouts:,} rollouts",
    )


def incomplete_step(step: Step | None) -> IncompleteStep | None:
    """Return what a step lacks that closed without some of its shards; None if it lacks nothing."""
    if step is None or step.closed_at_us is None or step.received_shards >= step.expected_shards:
        return None
    return IncompleteStep(
        step=step.step, attempt=step.attempt, shards=step.received_shards, expected_shards=step.expected_shards
    )


def incomplete_of_step(session: Session, key: StepKey) -> IncompleteStep | None:
    """Return what the step of this key lacks, as `incomplete_step` does."""
    return incomplete_step(session.get(Step, tuple(key)))


def with_shards(session: Session, run_id: str, step: int, attempt: int | None, answer: Answer) -> Answer:
    """Return the answer about a step with what the step lacks."""
    return replace(answer, incomplete=incomplete_of_step(session, resolve_step(session, run_id, step, attempt)))


def statistics_steps(session: Session, run_id: str, attempts: Sequence[AttemptStart]) -> list[StatisticsStep]:
    """Return the newest active steps of which shards were sent as statistics, newest first, at most 1,000.

    Steps whose tokens were purged are left out.
    """
    query = select(Step).where(
        Step.run_id == run_id,
        Step.full_rollouts.is_not(None),
        Step.tokens_purged_at_us.is_(None),
        is_active(attempts, Step.attempt, Step.step),
    )
    found = session.scalars(query.order_by(Step.step.desc()).limit(_MOST_STEPS))
    return [
        StatisticsStep(
            step=step.step,
            attempt=step.attempt,
            rollouts=step.rollouts,
            full_rollouts=step.full_rollouts or 0,
            text=coverage_in_words(step.rollouts, step.full_rollouts or 0),
        )
        for step in found
    ]
