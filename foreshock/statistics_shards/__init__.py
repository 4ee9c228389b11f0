"""Shards that travel as statistics: the sums over all their tokens, and some rollouts in full.

`encode_statistics_shard` measures a batch where it was sampled, with the code that measures a full shard in the
service; `StatisticsShard.from_bytes` reads the body.
"""

from __future__ import annotations

from foreshock.statistics_shards.body import MEDIA_TYPE, ShardPart, StatisticsShard
from foreshock.statistics_shards.encoding import FullRollouts, encode_statistics_shard
from foreshock.statistics_shards.statistics import statistics_of_shard

__all__ = [
    "MEDIA_TYPE",
    "FullRollouts",
    "ShardPart",
    "StatisticsShard",
    "encode_statistics_shard",
    "statistics_of_shard",
]
