"""The limits of one uploaded body. The Parquet footer is checked against them before a value is decoded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeLimits"]


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Upper limits of one shard, all inclusive. A larger body is a LimitExceededError (HTTP 413): send more shards."""

    max_body_bytes: int = 256 << 20
    max_rollouts: int = 65_536
    max_tokens: int = 64_000_000  # response tokens; the same limit holds for prompt tokens
    max_uncompressed_bytes: int = 2 << 30  # of all decoded columns together, also of a gzipped JSON file
    max_response_tokens: int = 1_048_576  # of one rollout
    max_prompt_tokens: int = 1_048_576  # of one rollout
    max_row_groups: int = 65_536
    max_footer_bytes: int = 16 << 20
    max_identifier_bytes: int = 1_024  # of one string, such as a sample id
    max_metadata_bytes: int = 1 << 20  # of one Parquet key–value pair
