"""Rollouts in memory and on disk: the schema, batches, validation, the Parquet codec, and JSON lines."""

from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.parquet import (
    decode_rollouts,
    decode_scores,
    encode_rollouts,
    encode_scores,
)
from foreshock.rollouts.schema import DecodeLimits
from foreshock.rollouts.scores import ScoreBatch

__all__ = [
    "BatchAttributes",
    "DecodeLimits",
    "RolloutBatch",
    "ScoreBatch",
    "decode_rollouts",
    "decode_scores",
    "encode_rollouts",
    "encode_scores",
]
