"""Schemas of steps."""

from __future__ import annotations

from pydantic import BaseModel, Field


class StepRead(BaseModel):
    """A step of one attempt."""

    step: int
    attempt: int
    shards: int = Field(description="number of stored shards")
    expected_shards: int
    closed: bool
    rollouts: int
    tokens: int = Field(description="response tokens")
    full_rollouts: int = Field(description="rollouts stored in full; all, unless shards were sent as statistics")
    coverage: str = Field(description="what the measures of the step rest on")
