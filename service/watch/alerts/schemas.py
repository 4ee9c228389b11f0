"""What alerts look like over HTTP."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foreshock.severity import Severity

AlertState = Literal["open", "acknowledged", "resolved", "retracted"]


class AlertRead(BaseModel):
    """A rule that fired: what was measured, why it matters, what to do.

    `resolved`: it stands no longer, or a person settled it, or a rewind superseded its step. `retracted`: with data
    that came late it never fired.
    """

    model_config = ConfigDict(from_attributes=True)

    id: str
    attempt: int
    rule: str
    step: int
    severity: Severity
    value: float
    threshold: float
    why: str
    what_to_do: str
    moves_learning_rate: bool
    evidence: dict[str, Any]
    state: AlertState
    cleared_step: int | None = Field(description="where the rule stopped standing; null while it stands")
    changed_by: Literal["detector", "operator", "rewind"]
    opened_at_us: int
    changed_at_us: int
