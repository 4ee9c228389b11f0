"""Check uploaded scores against the rollouts of their job. Runs in a decoder process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreshock.errors import LimitExceededError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import DecodeLimits, decode_scores, encode_scores
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts, read_rollouts
from foreshock_service.replay.probes.upload_checks import (
    check_fingerprint,
    check_one_value_per_token,
    check_rollouts_are_new,
    write_durably,
)
from foreshock_service.replay.scores.files import read_scores


@dataclass(frozen=True, slots=True)
class CheckedScores:
    """The size and the fingerprint of scores that match their rollouts."""

    rollouts: int
    tokens: int
    fingerprint: Fingerprint


def check_scores(
    body: Path, stored: Path, pinned: PinnedRollouts, siblings: tuple[StoredFile, ...], limits: DecodeLimits
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
        for sibling in siblings:
            check_rollouts_are_new(scores.sample_ids, read_scores(sibling).sample_ids)
        data = encode_scores(scores)
    except MemoryError as error:
        raise LimitExceededError("decoding needs more memory than allowed: send smaller shards") from error
    write_durably(stored, data)
    return CheckedScores(scores.num_rollouts, scores.num_tokens, scores.fingerprint)
