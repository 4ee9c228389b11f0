"""How much one body may hold. All of it is checked from the Parquet footer before a value is decoded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeLimits"]


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Upper limits, all inclusive. `max_tokens` holds for response tokens and, apart, for prompt tokens."""

    max_body_bytes: int = 256 << 20
    max_rollouts: int = 65_536
    max_tokens: int = 64_000_000
    max_uncompressed_bytes: int = 2 << 30
    max_response_tokens: int = 1_048_576
    max_prompt_tokens: int = 1_048_576
    max_row_groups: int = 65_536
    max_footer_bytes: int = 16 << 20
    max_identifier_bytes: int = 1_024
    max_metadata_bytes: int = 1 << 20
