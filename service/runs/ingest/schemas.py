"""The address of an uploaded shard, and the answer to its upload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from foreshock_service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Shard `shard` of `shards`, of a step in an attempt of a run, sent as tokens or as statistics."""

    run_id: str
    attempt: int
    step: int
    shard: int
    shards: int
    as_statistics: bool = False

    @property
    def step_key(self) -> StepKey:
        """Return the key of the step."""
        return StepKey(self.run_id, self.attempt, self.step)


class ShardReceipt(BaseModel):
    """The receipt of a stored shard: `stored` by this upload, or `duplicate` of an earlier upload of the same bytes."""

    status: Literal["stored", "duplicate"]
    digest: str = Field(description="of the body's bytes: `sha256:…`")
    rollouts: int
    tokens: int = Field(description="response tokens")
    full_rollouts: int = Field(description="rollouts that are stored in full; below `rollouts` if sent as statistics")
    step_closed: bool = Field(
        description="true if the step is complete, or its grace time is over, and its shards are folded"
    )
