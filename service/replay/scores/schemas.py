"""The schemas of score uploads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoreAddress:
    """The address of a score shard: its scorer, variant and number, and the lease and token that it is sent under."""

    lease_id: str
    token: int
    scorer: str
    variant: str
    shard: int
