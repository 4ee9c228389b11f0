"""The rollouts of a probe, as files: all of its shards, or a sample that keeps the distribution of lengths.

These functions decode token files; they run in a decoder process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foreshock.digests import rollout_set_digest
from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts import BatchAttributes, RolloutBatch, decode_rollouts, encode_rollouts
from foreshock.rollouts.sampling import select_rollouts
from service.platform.decoding.limits import stored_limits


@dataclass(frozen=True, slots=True)
class PinnedRollouts:
    """The token files in the order of their shards, and the size of the sample (None: all rollouts)."""

    files: tuple[Path, ...]
    max_rollouts: int | None


@dataclass(frozen=True, slots=True)
class RolloutCount:
    """Rollouts, response tokens and the digest of the set of sample ids; `of_rollouts` counts all in the files.

    `attributes` are those of the batch. `with_rollout_log_probs`: the engine's log-probs were logged.
    """

    rollouts: int
    tokens: int
    rollout_set_digest: str
    of_rollouts: int
    attributes: BatchAttributes
    with_rollout_log_probs: bool


def read_rollouts(pinned: PinnedRollouts) -> RolloutBatch:
    """Return the pinned rollouts in the order of their shards."""
    batch = RolloutBatch.concat(decode_rollouts(path.read_bytes(), stored_limits()) for path in pinned.files)
    if pinned.max_rollouts is None or pinned.max_rollouts >= batch.num_rollouts:
        return batch
    return batch.select(select_rollouts(batch.sample_ids, batch.response_lengths, pinned.max_rollouts))


def count_rollouts(pinned: PinnedRollouts) -> RolloutCount:
    """Count the pinned rollouts.

    Raises InvalidRolloutsError if two shards have the same sample id: their scores could not be distinguished.
    """
    everything = read_rollouts(PinnedRollouts(pinned.files, None))
    if len(set(everything.sample_ids)) != everything.num_rollouts:
        raise InvalidRolloutsError("two shards of the step have the same sample_id", column="sample_id")
    batch = read_rollouts(pinned)
    return RolloutCount(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        of_rollouts=everything.num_rollouts,
        attributes=batch.attributes,
        with_rollout_log_probs=batch.rollout_log_probs is not None,
    )


def write_rollouts(pinned: PinnedRollouts, target: Path) -> None:
    """Write the pinned rollouts as one Parquet file."""
    target.write_bytes(encode_rollouts(read_rollouts(pinned)))
