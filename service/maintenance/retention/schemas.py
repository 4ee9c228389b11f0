"""Schemas of retention."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from foreshock_service.platform.schemas import LARGEST_STEP


class RetentionRulesBody(BaseModel):
    """Rules of retention: which steps of a run keep their tokens."""

    model_config = ConfigDict(extra="forbid")

    last_steps: int | None = Field(
        default=None, ge=1, le=LARGEST_STEP, description="tokens of the newest so many steps; null: of all steps"
    )
    every_steps: int | None = Field(default=None, ge=1, le=LARGEST_STEP, description="tokens of each such step too")
    alert_steps: int = Field(
        default=2, ge=0, le=10_000, description="tokens of so many steps before and after each alert too"
    )
