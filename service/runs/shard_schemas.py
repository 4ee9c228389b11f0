"""Schemas of the shards that a closed step lacks. Apart from `shard_counts.py`: decoders import no database."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
