"""The address of an uploaded shard, and the answer to its upload."""

from __future__ import annotations

from dataclasses import dataclass

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
