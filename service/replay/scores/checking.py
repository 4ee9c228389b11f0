"""Check uploaded scores against the rollouts of their job. Runs in a decoder process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import DecodeLimits, RolloutBatch, ScoreBatch, decode_scores, encode_scores
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
        _check_fingerprint(scores.fingerprint)
        _check_against(scores, read_rollouts(pinned))
        _check_apart(scores, siblings)
        data = encode_scores(scores)
    except MemoryError as error:
        raise LimitExceededError("decoding needs more memory than allowed: send smaller shards") from error
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
                f"got {length} values, expected {expected[sample_id]}, one for each response token",
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
