"""Decode, validate, measure and re-encode one uploaded shard. Runs in a decoder process: knows files, not databases."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from foreshock.comparisons import STEP_ROW
from foreshock.digests import rollout_set_digest
from foreshock.errors import LimitExceededError
from foreshock.measures.comparison import measure_step
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_rollouts, encode_rollouts
from service.platform.decoding.limits import stored_limits
from service.runs.lint.evidence import LintPart, lint_shard

# Modules that a decoder process imports when it starts.
PRELOAD = (__name__,)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """What a shard adds to one comparison of its step: mergeable statistics and, for pairs, rollout summaries."""

    comparison: str
    statistics_version: int
    statistics: bytes
    summaries: bytes | None


@dataclass(frozen=True, slots=True)
class DecodedShard:
    """A valid shard: its sizes, its statistics, its lint, and the bytes of the file that was written for the store."""

    rollouts: int
    tokens: int
    rollout_set_digest: str
    file_bytes: int
    parts: tuple[ShardPart, ...]
    lint: LintPart


@dataclass(frozen=True, slots=True)
class StoredShard:
    """What is measured of a shard whose tokens are stored, its lint, and what tells that it is that shard."""

    rollout_set_digest: str
    tokens: int
    parts: tuple[ShardPart, ...]
    lint: LintPart


def decode_shard(body: Path, stored: Path, limits: DecodeLimits) -> DecodedShard:
    """Check and measure the upload in `body` and write it, in the store's own layout, to `stored`.

    Raises InvalidRolloutsError naming row and column, and LimitExceededError.
    """
    try:
        with body.open("rb") as file:
            batch = decode_rollouts(file, limits)
        parts = measure_shard(batch)
        lint = lint_shard(batch)
        data = encode_rollouts(batch)
    except MemoryError as error:
        raise LimitExceededError("decoding it needs more memory than allowed: send smaller shards") from error
    with stored.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return DecodedShard(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        file_bytes=len(data),
        parts=parts,
        lint=lint,
    )


def measure_stored(stored: Path) -> StoredShard:
    """What a file of the store gives now; raises FileNotFoundError where it is gone."""
    batch = decode_rollouts(stored.read_bytes(), stored_limits())
    return StoredShard(rollout_set_digest(batch.sample_ids), batch.num_tokens, measure_shard(batch), lint_shard(batch))


def measure_shard(batch: RolloutBatch) -> tuple[ShardPart, ...]:
    """The statistics of a batch: one part for the step itself, one for each pair of logged scores."""
    measured = measure_step(batch)
    step = ShardPart(STEP_ROW, measured.step.statistics_version, measured.step.to_bytes(), None)
    pairs = [
        ShardPart(
            name,
            comparison.statistics.statistics_version,
            comparison.statistics.to_bytes(),
            comparison.summaries.to_bytes(),
        )
        for name, comparison in sorted(measured.comparisons.items())
    ]
    return (step, *pairs)
