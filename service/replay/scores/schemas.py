"""The schemas of score uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field


@dataclass(frozen=True, slots=True)
class ScoreAddress:
    """The address of a score shard: its scorer, variant and number, and the lease and token that it is sent under."""

    lease_id: str
    token: int
    scorer: str
    variant: str
    shard: int


class ScoreReceipt(BaseModel):
    """A receipt: the scores are `stored` now, or a `duplicate` of bytes that were stored before."""

    status: Literal["stored", "duplicate"]
    digest: str = Field(description="digest of the body's bytes: `sha256:…`")
    rollouts: int
    tokens: int = Field(description="response tokens")
