"""Schema of what an answer about a step rests on."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

RestsOn = Literal["all tokens", "some rollouts"]


class CoverageRead(BaseModel):
    """What an answer rests on: all tokens of the step, or some of its rollouts."""

    rests_on: RestsOn
    rollouts: int = Field(description="rollouts of the step")
    used_rollouts: int = Field(description="those that the answer rests on")
    full_rollouts: int = Field(description="those that are stored in full; all, unless shards were sent as statistics")
    text: str


class StatisticsStep(BaseModel):
    """A step of which shards were sent as statistics: measured over all tokens, with some rollouts in full."""

    step: int
    attempt: int
    rollouts: int
    full_rollouts: int
    text: str
