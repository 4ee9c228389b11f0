"""What an uploaded score shard is answered with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field


@dataclass(frozen=True, slots=True)
class ScoreAddress:
    """Which shard of which scorer's log-probs, sent under which lease with which token."""

    lease_id: str
    token: int
    scorer: str
    variant: str
    shard: int


class ScoreReceipt(BaseModel):
    """The scores are stored: now (`stored`) or by an earlier upload of the same bytes (`duplicate`)."""

    status: Literal["stored", "duplicate"]
    digest: str = Field(description="of the body's bytes: `sha256:…`")
    rollouts: int
    tokens: int = Field(description="response tokens")
