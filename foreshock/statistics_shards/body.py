"""The body of a shard that travels as statistics: a JSON header, and the parts that it lists, one after the other.

4 bytes "FSSH" | 4 bytes header length | header | parts

A part is a blob of statistics, a table of rollout summaries, or the Parquet file of the rollouts in full, each in the
form that is stored. Nothing in a body is executed, and every part is checked by its own reader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from foreshock.digests import canonical_json
from foreshock.errors import StatisticsError
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.statistics_shards.statistics import ShardPart

__all__ = ["MEDIA_TYPE", "ShardPart", "StatisticsShard"]

MEDIA_TYPE = "application/vnd.foreshock.statistics"

_MAGIC = b"FSSH"
_MAX_HEADER_BYTES = 1 << 16
_COUNTS = ("rollouts", "tokens", "sampled")
_LARGEST_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class StatisticsShard:
    """Statistics over all `rollouts` and response `tokens` of a shard, and a Parquet file of some of its rollouts.

    The first `sampled` rows of the file are the sample that keeps the distribution of lengths; the others were chosen
    for their large |d|, so that they are a biased sample. `rollout_set_digest` is of all rollouts.
    """

    rollouts: int
    tokens: int
    rollout_set_digest: str
    sampled: int
    statistics: tuple[ShardPart, ...]
    full: bytes | memoryview

    def to_bytes(self) -> bytes:
        """Return the body for `from_bytes`; equal shards give equal bytes."""
        parts: list[bytes | memoryview] = []
        listed = []
        for each in self.statistics:
            listed.append([each.comparison, len(each.statistics), len(each.summaries or b"")])
            parts += [each.statistics, each.summaries or b""]
        header = canonical_json(
            {
                "statistics_version": STATISTICS_VERSION,
                "rollouts": self.rollouts,
                "tokens": self.tokens,
                "sampled": self.sampled,
                "rollout_set_digest": self.rollout_set_digest,
                "statistics": listed,
                "full": len(self.full),
            }
        ).encode()
        return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *parts, self.full])

    @classmethod
    def from_bytes(cls, data: bytes) -> StatisticsShard:
        """Return the shard of `to_bytes()`; its parts are not read.

        Raises StatisticsError if the body is damaged, or of another version of the statistics: such a shard cannot be
        measured again where its tokens are not.
        """
        header, position = _header(data)
        version = header.get("statistics_version")
        if version != STATISTICS_VERSION:
            raise StatisticsError(
                f"statistics must be of version {STATISTICS_VERSION}, got {version!r}: install the same release of "
                'foreshock in trainer and service, or log with Client(mode="tokens")'
            )
        counts = {name: _count(header, name) for name in _COUNTS}
        digest = header.get("rollout_set_digest")
        if not isinstance(digest, str) or len(digest) > 100:
            raise StatisticsError("the body is damaged: its header has no `rollout_set_digest`")
        statistics = []
        for name, size, summaries_size in _listed(header):
            end = position + size
            summaries = data[end : end + summaries_size] if summaries_size else None
            statistics.append(ShardPart(name, STATISTICS_VERSION, data[position:end], summaries))
            position = end + summaries_size
        full = data[position:]
        if len(full) != _count(header, "full"):
            raise StatisticsError("the body is damaged: its size differs from its header")
        return cls(counts["rollouts"], counts["tokens"], digest, counts["sampled"], tuple(statistics), full)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    if len(data) < 8 or data[:4] != _MAGIC:
        raise StatisticsError("the bytes are not a shard of statistics")
    length = int.from_bytes(data[4:8], "little")
    if length > _MAX_HEADER_BYTES or 8 + length > len(data):
        raise StatisticsError("the body is damaged: its header is truncated")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise StatisticsError("the body is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise StatisticsError("the body is damaged: its header is not an object")
    return header, 8 + length


def _count(header: dict[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or not 0 <= value < _LARGEST_COUNT:
        raise StatisticsError(f"the body is damaged: `{name}` must be a whole number, got {value!r}")
    return value


def _listed(header: dict[str, Any]) -> list[tuple[str, int, int]]:
    listed = header.get("statistics")
    if not isinstance(listed, list):
        raise StatisticsError("the body is damaged: its header lists no statistics")
    found: list[tuple[str, int, int]] = []
    for item in listed:
        if (
            not isinstance(item, list)
            or [type(value) for value in item] != [str, int, int]
            or min(item[1:]) < 0
            or any(item[0] == name for name, _, _ in found)
        ):
            raise StatisticsError("the body is damaged: its header lists invalid statistics")
        found.append((item[0], item[1], item[2]))
    return found
