"""Check uploaded scores against the rollouts of their job. Runs in a decoder process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_scores, encode_scores
from service.platform.schemas import storable_json
from service.replay.probes.pinned_rollouts import PinnedRollouts, read_rollouts
from service.replay.scores.files import read_scores


@dataclass(frozen=True, slots=True)
class CheckedScores:
    """The size and the fingerprint of scores that match their rollouts."""

    rollouts: int
    tokens: int
    fingerprint: Fingerprint


def check_scores(
    body: Path, stored: Path, pinned: PinnedRollouts, siblings: tuple[Path, ...], limits: DecodeLimits
) -> CheckedScores:
    """Check the upload in `body` against its rollouts and write it, in the store's layout, to `stored`.

    `siblings` are the stored shards of the same score. Raises InvalidRolloutsError naming row and column if the body
    is not a score table, names a rollout that is not of this job or is in a sibling, or has another number of values
    than that rollout has response tokens. Raises LimitExceededError beyond `limits`.
    """
    try:
        with body.open("rb") as file:
            scores = decode_scores(file, limits)
        check_fingerprint(scores.fingerprint)
        check_one_value_per_token(scores.sample_ids, np.diff(scores.offsets), read_rollouts(pinned), "log_probs")
        for path in siblings:
            check_rollouts_are_new(scores.sample_ids, read_scores(path).sample_ids)
        data = encode_scores(scores)
    except MemoryError as error:
        raise LimitExceededError("decoding needs more memory than allowed: send smaller shards") from error
    with stored.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return CheckedScores(scores.num_rollouts, scores.num_tokens, scores.fingerprint)


def check_fingerprint(fingerprint: Fingerprint) -> None:
    """Raise InvalidRolloutsError if the database cannot store the fingerprint."""
    try:
        storable_json(fingerprint.to_dict())
    except ValueError as error:
        raise InvalidRolloutsError(f"its fingerprint {error}") from error


def check_one_value_per_token(
    sample_ids: Sequence[str], lengths: NDArray[np.int64], rollouts: RolloutBatch, column: str
) -> None:
    """Raise InvalidRolloutsError unless all rollouts are of the job, with as many values as response tokens."""
    expected = dict(zip(rollouts.sample_ids, rollouts.response_lengths.tolist(), strict=True))
    for row, (sample_id, length) in enumerate(zip(sample_ids, lengths.tolist(), strict=True)):
        if sample_id not in expected:
            raise InvalidRolloutsError(f"{sample_id!r} is not one of this job's rollouts", row=row, column="sample_id")
        if length != expected[sample_id]:
            raise InvalidRolloutsError(
                f"got {length} values, expected {expected[sample_id]}, one for each response token",
                row=row,
                column=column,
            )


def check_rollouts_are_new(sample_ids: Sequence[str], of_sibling: Sequence[str]) -> None:
    """Raise InvalidRolloutsError if another shard of the same result has one of the rollouts."""
    rows = {sample_id: row for row, sample_id in enumerate(sample_ids)}
    for sample_id in of_sibling:
        if sample_id in rows:
            raise InvalidRolloutsError(
                f"{sample_id!r} is in another shard of this score: send each rollout once",
                row=rows[sample_id],
                column="sample_id",
            )
