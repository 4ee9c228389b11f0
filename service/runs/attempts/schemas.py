"""Schemas of attempts."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from foreshock_service.platform.parameters import JsonObject, Name, Step


class AttemptCreate(BaseModel):
    """An attempt to get or create; `key` is the client's own name for this start or resume."""

    key: Name
    resume_step: Step = Field(default=0, description="the first step that this attempt computes")
    fingerprint: JsonObject = Field(default_factory=dict)
    heartbeats: bool = Field(
        default=False, description="the client sends heartbeats, so that its silence has a meaning"
    )


Count = Annotated[int, Field(ge=0, lt=2**63)]


class Heartbeat(BaseModel):
    """A sign of life of a client, with the items that it could not deliver since it was created."""

    shard: Step | None = Field(default=None, description="the rank's shard, if the client knows it")
    undelivered: Count = Field(default=0, description="kept by the client, which tries again")
    rejected: Count = 0
    dropped: Count = 0
    invalid: Count = 0
    reason: str | None = Field(default=None, max_length=1000, pattern=r"^[^\x00]*$")

    @property
    def lost(self) -> int:
        """The items that the client does not try to deliver again."""
        return self.rejected + self.dropped + self.invalid
