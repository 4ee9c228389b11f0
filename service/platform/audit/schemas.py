"""The HTTP schema of the audit."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class AuditRead(BaseModel):
    """One change."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    at_us: int
    actor: str = Field(description="a key's id, `anonymous` (a service without keys), `service`, or `console:<user>`")
    action: str = Field(description="such as `alert.acknowledge`, `advice.release`, `run.delete`, `key.revoke`")
    subject: str = Field(description="id of what was changed")
    project: str | None = Field(description="null: the whole service")
    run_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str | None
