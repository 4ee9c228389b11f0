"""What the answers about a step rest on. Other nouns state it with these words."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.api.runs import Coverage, IncompleteStep, StatisticsStep
from foreshock_service.runs.attempts.active_attempts import AttemptStart
from foreshock_service.runs.coverage import repository
from foreshock_service.runs.step_key import StepKey

_MOST_STEPS = 1000


def coverage_in_words(rollouts: int, full_rollouts: int) -> str:
    """Return what the measures of a step rest on."""
    if full_rollouts >= rollouts:
        return "all tokens"
    return f"all tokens, in statistics; {full_rollouts:,} of {rollouts:,} rollouts in full"


def coverage_of_step(session: Session, key: StepKey, used: int | None = None) -> Coverage:
    """Return what an answer about a step rests on: `used` of its rollouts; None: those that are stored in full."""
    rollouts, full = repository.counts(session, key) or (0, None)
    full = rollouts if full is None else full
    used = full if used is None else used
    whole = used >= rollouts
    return Coverage(
        rests_on="all tokens" if whole else "some rollouts",
        rollouts=rollouts,
        used_rollouts=used,
        full_rollouts=full,
        text=coverage_in_words(rollouts, full) if whole else f"{used:,} of {rollouts:,} rollouts",
    )


def incomplete_of_step(session: Session, key: StepKey) -> IncompleteStep | None:
    """Return what a step lacks that closed without some of its shards; None if it lacks nothing."""
    counts = repository.incomplete_counts(session, key)
    if counts is None:
        return None
    return IncompleteStep(step=key.step, attempt=key.attempt, shards=counts[0], expected_shards=counts[1])


def statistics_steps(session: Session, run_id: str, attempts: Sequence[AttemptStart]) -> list[StatisticsStep]:
    """Return the newest active steps of which shards were sent as statistics, newest first, at most 1,000."""
    found = repository.statistics_steps(session, run_id, attempts, _MOST_STEPS)
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
