"""Schemas of attempts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from service.platform.schemas import JsonObject, Name, Step


class AttemptCreate(BaseModel):
    """An attempt to get or create; `key` is the client's own name for this start or resume."""

    key: Name
    resume_step: Step = Field(default=0, description="the first step that this attempt computes")
    fingerprint: JsonObject = Field(default_factory=dict)


class AttemptRead(BaseModel):
    """An attempt; its number counts from 1 in each run."""

    model_config = ConfigDict(from_attributes=True)

    attempt: int
    key: str
    resume_step: int
    created_at_us: int
