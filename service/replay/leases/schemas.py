"""The HTTP schemas of leases."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from foreshock_service.platform.parameters import Name
from foreshock_service.replay.probes.schemas import Accelerator, EnvironmentName, PairKey, ScorerName

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
