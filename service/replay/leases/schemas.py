"""The HTTP schemas of leases."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from foreshock_service.platform.parameters import Name
from foreshock_service.replay.probes.schemas import Accelerator, EnvironmentName, PairKey, ScorerName, ScorerRequest

Token = int


def _storable(text: str) -> str:
    """Replace NUL characters: a reason is often a traceback, and PostgreSQL stores no NUL in text."""
    return text.replace("\x00", "�")


class LeaseRequest(BaseModel):
    """A worker's request for a job that it can do."""

    worker: Name = Field(description="unique name of the worker")
    accelerator: Accelerator = "cpu"
    device_name: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    environments: list[EnvironmentName] = Field(
        default_factory=list, max_length=64, description="the environments that the worker can score in"
    )
    scorers: list[ScorerName] = Field(min_length=1, max_length=64, description="all scorers that the worker offers")
    exact_pairs: list[PairKey] = Field(default=[], max_length=64, description="all exact pairs that the worker offers")
    wait: float = Field(default=0.0, ge=0, le=60, description="seconds to wait if there is no job")


class CheckpointRead(BaseModel):
    """The place of the weights: `path` below a root that the worker's own configuration names."""

    root: str
    path: str
    format: str
    digest: str
    step: int
    weights_version: int | None


class RolloutsRead(BaseModel):
    """The rollouts to score."""

    count: int
    tokens: int = Field(description="response tokens")
    digest: str = Field(description="digest of the set of their sample ids")


class LeasedJob(BaseModel):
    """The job of a lease."""

    id: str
    probe: str
    run: str
    project: str = Field(description="of the run; the worker's weights roots are bound to projects")
    attempt: int
    step: int
    kind: str
    scorers: list[ScorerRequest]
    exact_pairs: list[str] = Field(description="comparisons `target/behaviour` over the whole vocabulary")
    options: dict[str, Any] = Field(description="options by scorer")
    environment: str | None = Field(description="the environment to score in; null: as the worker is")
    checkpoint: CheckpointRead
    candidates: list[CheckpointRead] = Field(description="of a weights search: the other weights to try, in this order")
    rollouts: RolloutsRead


class LeaseRead(BaseModel):
    """A lease of a job. The worker sends `token` with each later request; heartbeats extend the lease."""

    lease: str
    token: Token
    expires_at_us: int = Field(description="end of the lease by the database's clock")
    heartbeat_seconds: float = Field(description="interval of heartbeats")
    job: LeasedJob


class TokenBody(BaseModel):
    """The lease's fencing token."""

    model_config = ConfigDict(extra="forbid")

    token: Token = Field(ge=1, lt=2**63)


class FailBody(TokenBody):
    """The reason of a failed try. retry: another try may succeed; final: none can; skipped: the weights are gone."""

    reason: Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_storable)]
    kind: Literal["retry", "final", "skipped"]


class HeartbeatRead(BaseModel):
    """The new end of the lease."""

    expires_at_us: int


class UploadReceipt(BaseModel):
    """A receipt: the uploaded values are `stored` now, or a `duplicate` of bytes that were stored before."""

    status: Literal["stored", "duplicate"]
    digest: str = Field(description="digest of the body's bytes: `sha256:…`")
    rollouts: int
    tokens: int = Field(description="response tokens")
