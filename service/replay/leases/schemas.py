"""What leases look like over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from service.platform.schemas import Name
from service.replay.probes.schemas import Accelerator, ScorerName, ScorerRequest

Token = int


def _storable(text: str) -> str:
    """A reason is often a traceback, and may hold what a database does not take."""
    return text.replace("\x00", "�")


class LeaseRequest(BaseModel):
    """A worker asks for a job that it can do."""

    worker: Name = Field(description="the worker's name; one name is one worker")
    accelerator: Accelerator = "cpu"
    device_name: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    scorers: list[ScorerName] = Field(min_length=1, max_length=64, description="all that it can do")
    wait: float = Field(default=0.0, ge=0, le=60, description="seconds to wait for a job where there is none")


class CheckpointRead(BaseModel):
    """Where the weights are: `path` below a root that the worker's own configuration names."""

    root: str
    path: str
    format: str
    digest: str
    step: int
    weights_version: int | None


class RolloutsRead(BaseModel):
    """How many rollouts are to be scored, and which."""

    count: int
    tokens: int
    digest: str = Field(description="of the set of their sample ids")


class LeasedJob(BaseModel):
    """What is to be done."""

    id: str
    probe: str
    run: str
    attempt: int
    step: int
    kind: str
    scorers: list[ScorerRequest]
    options: dict[str, Any] = Field(description="by scorer")
    checkpoint: CheckpointRead
    rollouts: RolloutsRead


class LeaseRead(BaseModel):
    """A job, for a while. `token` is sent with everything that follows; heartbeats keep the lease."""

    lease: str
    token: Token
    expires_at_us: int = Field(description="by the database's clock")
    heartbeat_seconds: float = Field(description="how often to send a heartbeat")
    job: LeasedJob


class TokenBody(BaseModel):
    """The lease's fencing token."""

    model_config = ConfigDict(extra="forbid")

    token: Token = Field(ge=1, lt=2**63)


class FailBody(TokenBody):
    """Why the job was not done. retry: another try may do it; final: none can; skipped: the weights are gone."""

    reason: Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_storable)]
    kind: Literal["retry", "final", "skipped"]


class HeartbeatRead(BaseModel):
    """The lease's new end."""

    expires_at_us: int
