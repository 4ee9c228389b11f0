"""Shards that travel as statistics: the sums over all their tokens, and some rollouts in full.

`encode_statistics_shard` measures a batch where it was sampled, with the code that measures a full shard in the
service; `StatisticsShard.from_bytes` reads the body: a JSON header, and the parts that it lists, one after the other.

4 bytes "FSSH" | 4 bytes header length | header | parts

A part is a blob of statistics, a table of rollout summaries, or the Parquet file of the rollouts in full, each in the
form that is stored. Nothing in a body is executed, and every part is checked by its own reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.digests import canonical_json, rollout_set_digest
from foreshock.errors import StatisticsError
from foreshock.measures.comparison import StepMeasurement, measure_step
from foreshock.measures.statistics.blob import STATISTICS_VERSION, read_header
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.parquet import encode_rollouts_view
from foreshock.rollouts.sampling import select_rollouts


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A shard's contribution to one comparison of its step: mergeable statistics and, for pairs, rollout summaries."""

    comparison: str
    statistics_version: int
    statistics: bytes
    summaries: bytes | None


def statistics_of_shard(measurement: StepMeasurement) -> tuple[ShardPart, ...]:
    """Return the statistics of the rollouts (STEP_ROW) and of each comparison, by its name."""
    own = ShardPart(STEP_ROW, measurement.step.statistics_version, measurement.step.to_bytes(), None)
    pairs = [
        ShardPart(name, pair.statistics.statistics_version, pair.statistics.to_bytes(), pair.summaries.to_bytes())
        for name, pair in sorted(measurement.comparisons.items())
    ]
    return own, *pairs


MEDIA_TYPE = "application/vnd.foreshock.statistics"

_MAGIC = b"FSSH"
_MAX_HEADER_BYTES = 1 << 16
_COUNTS = ("rollouts", "tokens", "sampled")
_LARGEST_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class StatisticsShard:
    """Statistics over all `rollouts` and response `tokens` of a shard, and a Parquet file of some of its rollouts.

    The first `sampled` rows of the file are the sample that keeps the distribution of lengths; the other rows were
    chosen for their large |d| and are a biased sample. `rollout_set_digest` is the digest of all rollouts.
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
        """Restore the shard from `to_bytes()`; its parts are not decoded.

        Raises StatisticsError if the body is damaged, or of another version of the statistics: such a shard cannot be
        measured again, because its tokens are not in it.
        """
        header, position = read_header(data, _MAGIC, "shard", _MAX_HEADER_BYTES)
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


# Room for the header of the body, whose numbers are not known yet.
_HEADER_BYTES = 1024
# A smaller sample aims at this share of the bound: fewer rollouts compress worse.
_MARGIN = 0.97

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FullRollouts:
    """Numbers of rollouts of a shard that are sent in full: `sampled` by length, and the `worst` by their largest |d|.

    Of the sample, fewer travel if the whole body would exceed `max_bytes`; at least one always does.
    """

    sampled: int = 64
    worst: int = 4
    max_bytes: int = 950_000

    def of_shard(self, shard: int, shards: int) -> FullRollouts:
        """Return the part of one shard, if these numbers are for a whole step of `shards` shards.

        Every shard sends at least one of each kind, because it does not know whether others have worse ones.
        """
        sampled = self.sampled // shards + (shard < self.sampled % shards)
        worst = max(1, self.worst // shards) if self.worst else 0
        return FullRollouts(max(1, sampled), worst, self.max_bytes // shards)


def encode_statistics_shard(batch: RolloutBatch, *, seed: str, full: FullRollouts) -> bytes:
    """Return the body of a batch: its statistics over all tokens, and some rollouts in full.

    Equal batches, seeds and numbers give equal bytes under one release and one pass over the tokens.
    """
    measurement = measure_step(batch)
    statistics = statistics_of_shard(measurement)
    used = _HEADER_BYTES + sum(len(each.statistics) + len(each.summaries or b"") for each in statistics)
    worst = _worst(measurement, full.worst)
    sampled, encoded = _encode_full(batch, seed, full.sampled, worst, full.max_bytes - used)
    return StatisticsShard(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        sampled=sampled,
        statistics=statistics,
        full=encoded,
    ).to_bytes()


def _worst(measurement: StepMeasurement, most: int) -> Rows:
    """Return the rows of the rollouts with the largest |d| of a token, worst first; none without both log-probs."""
    pair = measurement.comparisons.get(TRAINER_ROLLOUT)
    if pair is None or most == 0:
        return np.zeros(0, np.int64)
    largest = pair.summaries.largest_abs_d()
    order = np.argsort(-np.nan_to_num(largest, nan=-1.0), kind="stable")[:most]
    return np.asarray(order[~np.isnan(largest[order])], dtype=np.int64)


def _encode_full(batch: RolloutBatch, seed: str, most: int, worst: Rows, max_bytes: int) -> tuple[int, memoryview]:
    """Return the size of the sample, and the Parquet file of the sample followed by the other worst rollouts."""
    wanted = min(most, batch.num_rollouts)
    while True:
        sample = select_rollouts(batch.sample_ids, batch.response_lengths, wanted, seed)
        rows = np.concatenate([sample, worst[~np.isin(worst, sample)]])
        encoded = encode_rollouts_view(batch.select(rows))
        if len(encoded) <= max_bytes or wanted <= 1:
            return sample.size, encoded
        wanted = max(1, min(wanted - 1, int(_MARGIN * wanted * max_bytes / len(encoded))))
