"""Schemas of a run's risk."""

from __future__ import annotations

from pydantic import BaseModel, Field

from foreshock.diagnosis.risk import RiskLevel


class RiskRead(BaseModel):
    """An ordinal level with its reasons; no probability."""

    level: RiskLevel
    score: int = Field(ge=0, le=4, description="0 calm, 1 watch, 2 elevated, 3 high, 4 critical")
    reasons: list[str]
    note: str = Field(description="why the level is no probability")
    observed_step: int | None = Field(description="the newest closed step that the level is about")
