"""Shards that a closed step lacks: what every answer about one step says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from sqlalchemy.orm import Session

from foreshock.api.runs import IncompleteStep, OfStep
from foreshock_service.platform.database.tables import Step
from foreshock_service.runs.attempts.service import resolve_step

Answer = TypeVar("Answer", bound=OfStep)


def incomplete_step(step: Step | None) -> IncompleteStep | None:
    """Return what a step lacks that closed without some of its shards; None if it lacks nothing."""
    if step is None or step.closed_at_us is None or step.received_shards >= step.expected_shards:
        return None
    return IncompleteStep(
        step=step.step, attempt=step.attempt, shards=step.received_shards, expected_shards=step.expected_shards
    )


def with_shards(session: Session, run_id: str, step: int, attempt: int | None, answer: Answer) -> Answer:
    """Return the answer about a step with what the step lacks."""
    found = session.get(Step, tuple(resolve_step(session, run_id, step, attempt)))
    return replace(answer, incomplete=incomplete_step(found))
