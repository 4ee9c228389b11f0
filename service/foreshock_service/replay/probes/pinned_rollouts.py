"""The rollouts of a probe, as files: all of its shards, or a sample that keeps the distribution of lengths.

These functions decode token files; they run in a decoder process.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from foreshock.digests import rollout_set_digest
from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts import BatchAttributes, RolloutBatch, decode_rollouts, encode_rollouts, sampling
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.tokens import StoredFile


@dataclass(frozen=True, slots=True)
class PinnedRollouts:
    """The token files in the order of their shards, and the size of the sample (None: all rollouts).

    The file of a shard that was sent as statistics begins with a sample, whose size is in `samples`; rollouts chosen
    for their large differences follow. Only the sample is pinned. `unstored` counts the shards' other rollouts.
    """

    files: tuple[StoredFile, ...]
    max_rollouts: int | None
    samples: tuple[int | None, ...] = ()
    unstored: int = 0


@dataclass(frozen=True, slots=True)
class RolloutCount:
    """Numbers of rollouts and response tokens, and the digest of the sample ids; `of_rollouts` counts whole shards.

    `attributes` are those of the batch. `with_log_probs`: log-probs of the engine or the trainer were logged.
    """

    rollouts: int
    tokens: int
    rollout_set_digest: str
    of_rollouts: int
    attributes: BatchAttributes
    with_log_probs: bool


def read_rollouts(pinned: PinnedRollouts) -> RolloutBatch:
    """Return the pinned rollouts in the order of their shards."""
    samples = pinned.samples or (None,) * len(pinned.files)
    batch = RolloutBatch.concat(_read(path, sample) for path, sample in zip(pinned.files, samples, strict=True))
    if pinned.max_rollouts is None or pinned.max_rollouts >= batch.num_rollouts:
        return batch
    return batch.select(sampling.select_rollouts(batch.sample_ids, batch.response_lengths, pinned.max_rollouts))


def _read(file: StoredFile, sample: int | None) -> RolloutBatch:
    batch = decode_rollouts(file.read_bytes(), stored_limits())
    return batch if sample is None else batch.select(range(sample))


def count_rollouts(pinned: PinnedRollouts) -> RolloutCount:
    """Count the pinned rollouts.

    Raises InvalidRolloutsError if two shards have the same sample id: their scores could not be distinguished.
    """
    everything = read_rollouts(replace(pinned, max_rollouts=None))
    if len(set(everything.sample_ids)) != everything.num_rollouts:
        raise InvalidRolloutsError("two shards of the step have the same sample_id", column="sample_id")
    batch = read_rollouts(pinned)
    return RolloutCount(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        of_rollouts=everything.num_rollouts + pinned.unstored,
        attributes=batch.attributes,
        with_log_probs=batch.rollout_log_probs is not None or batch.trainer_log_probs is not None,
    )


def write_rollouts(pinned: PinnedRollouts, target: Path) -> None:
    """Write the pinned rollouts as one Parquet file."""
    target.write_bytes(encode_rollouts(read_rollouts(pinned)))
