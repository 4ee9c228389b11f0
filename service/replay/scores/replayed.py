"""A probe's rollouts, and the scores that a worker sends for them, as files. Runs in a decoder process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreshock.digests import rollout_set_digest
from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import (
    DecodeLimits,
    RolloutBatch,
    ScoreBatch,
    decode_rollouts,
    decode_scores,
    encode_rollouts,
    encode_scores,
)
from service.platform.decoding.limits import stored_limits
from service.platform.schemas import storable_json
from service.replay.probes.selection import select_rollouts


@dataclass(frozen=True, slots=True)
class PinnedRollouts:
    """Where a probe's rollouts are: files in order, and how many of their rollouts are meant (None: all)."""

    files: tuple[Path, ...]
    max_rollouts: int | None


@dataclass(frozen=True, slots=True)
class RolloutCount:
    """How many rollouts and response tokens, and which (their set's digest); `of_rollouts` were there in all."""

    rollouts: int
    tokens: int
    rollout_set_digest: str
    of_rollouts: int


@dataclass(frozen=True, slots=True)
class CheckedScores:
    """Scores that fit their rollouts."""

    rollouts: int
    tokens: int
    fingerprint: Fingerprint


def read_rollouts(pinned: PinnedRollouts) -> RolloutBatch:
    """The rollouts that are meant, in the order of their shards."""
    batch = RolloutBatch.concat(_read(path) for path in pinned.files)
    if pinned.max_rollouts is None or pinned.max_rollouts >= batch.num_rollouts:
        return batch
    return batch.select(select_rollouts(batch.sample_ids, batch.response_lengths, pinned.max_rollouts))


def count_rollouts(pinned: PinnedRollouts) -> RolloutCount:
    """How many they are. Raises InvalidRolloutsError where an id is in two shards: scores could not be told apart."""
    everything = read_rollouts(PinnedRollouts(pinned.files, None))
    if len(set(everything.sample_ids)) != everything.num_rollouts:
        raise InvalidRolloutsError("the step has the same sample_id in two shards", column="sample_id")
    batch = read_rollouts(pinned)
    return RolloutCount(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        of_rollouts=everything.num_rollouts,
    )


def write_rollouts(pinned: PinnedRollouts, target: Path) -> None:
    """Write the rollouts that are meant as one Parquet file."""
    target.write_bytes(encode_rollouts(read_rollouts(pinned)))


def check_scores(
    body: Path, stored: Path, pinned: PinnedRollouts, siblings: tuple[Path, ...], limits: DecodeLimits
) -> CheckedScores:
    """Check the upload in `body` against its rollouts and write it, in the store's own layout, to `stored`.

    `siblings` are the shards of the same score that are there. Raises InvalidRolloutsError naming row and column where
    it is no score table, names a rollout that is not of this probe or is in a sibling, or has another number of values
    than that rollout has response tokens; LimitExceededError.
    """
    try:
        with body.open("rb") as file:
            scores = decode_scores(file, limits)
        _check_fingerprint(scores.fingerprint)
        _check_against(scores, read_rollouts(pinned))
        _check_apart(scores, siblings)
        data = encode_scores(scores)
    except MemoryError as error:
        raise LimitExceededError("decoding it needs more memory than allowed: send smaller shards") from error
    with stored.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return CheckedScores(scores.num_rollouts, scores.num_tokens, scores.fingerprint)


def _check_fingerprint(fingerprint: Fingerprint) -> None:
    try:
        storable_json(fingerprint.to_dict())
    except ValueError as error:
        raise InvalidRolloutsError(f"its fingerprint {error}") from error


def _check_against(scores: ScoreBatch, rollouts: RolloutBatch) -> None:
    expected = dict(zip(rollouts.sample_ids, rollouts.response_lengths.tolist(), strict=True))
    for row, (sample_id, length) in enumerate(zip(scores.sample_ids, np.diff(scores.offsets).tolist(), strict=True)):
        if sample_id not in expected:
            raise InvalidRolloutsError(f"{sample_id!r} is not one of this job's rollouts", row=row, column="sample_id")
        if length != expected[sample_id]:
            raise InvalidRolloutsError(
                f"has {length} values where the rollout has {expected[sample_id]} response tokens",
                row=row,
                column="log_probs",
            )


def _check_apart(scores: ScoreBatch, siblings: tuple[Path, ...]) -> None:
    rows = {sample_id: row for row, sample_id in enumerate(scores.sample_ids)}
    for path in siblings:
        for sample_id in read_scores(path).sample_ids:
            if sample_id in rows:
                raise InvalidRolloutsError(
                    f"{sample_id!r} is in another shard of this score: send each rollout once",
                    row=rows[sample_id],
                    column="sample_id",
                )


def read_scores(path: Path) -> ScoreBatch:
    """A stored score shard."""
    return decode_scores(path.read_bytes(), stored_limits())


def _read(path: Path) -> RolloutBatch:
    return decode_rollouts(path.read_bytes(), stored_limits())
