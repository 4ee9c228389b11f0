"""Shards that a closed step lacks: what every answer about one step says of them."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from service.platform.database.tables import Step
from service.runs.attempts.service import resolve_step


class IncompleteStep(BaseModel):
    """A step that closed without some of its shards: its measurements are of the rollouts that arrived."""

    step: int
    attempt: int
    shards: int
    expected_shards: int


class AnswerOfStep(BaseModel):
    """What every answer about one step says of its shards."""

    incomplete: IncompleteStep | None = Field(
        default=None, description="the step closed without some of its shards; null: it has all, or is still open"
    )


Answer = TypeVar("Answer", bound=AnswerOfStep)


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
    return answer.model_copy(update={"incomplete": incomplete_step(found)})
