"""Check uploaded divergences against the rollouts of their job. Runs in a decoder process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreshock.errors import LimitExceededError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import DecodeLimits, decode_exact, encode_exact
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.exact.files import read_exact
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts, read_rollouts
from foreshock_service.replay.probes.upload_checks import (
    check_fingerprint,
    check_one_value_per_token,
    check_rollouts_are_new,
    write_durably,
)


@dataclass(frozen=True, slots=True)
class CheckedExact:
    """The size and the fingerprints of divergences that match their rollouts."""

    rollouts: int
    tokens: int
    target_fingerprint: Fingerprint
    behaviour_fingerprint: Fingerprint


def check_exact(
    body: Path, stored: Path, pinned: PinnedRollouts, siblings: tuple[StoredFile, ...], limits: DecodeLimits
) -> CheckedExact:
    """Check the upload in `body` against its rollouts and write it, in the store's layout, to `stored`.

    `siblings` are the stored shards of the same pair. Raises InvalidRolloutsError naming row and column if the body is
    not a table of divergences, names a rollout that is not of this job or is in a sibling, or has another number of
    values than that rollout has response tokens. Raises LimitExceededError beyond `limits`.
    """
    try:
        with body.open("rb") as file:
            exact = decode_exact(file, limits)
        for fingerprint in (exact.target_fingerprint, exact.behaviour_fingerprint):
            check_fingerprint(fingerprint)
        check_one_value_per_token(exact.sample_ids, np.diff(exact.offsets), read_rollouts(pinned), "kl")
        for sibling in siblings:
            check_rollouts_are_new(exact.sample_ids, read_exact(sibling).sample_ids)
        data = encode_exact(exact)
    except MemoryError as error:
        raise LimitExceededError("decoding needs more memory than allowed: send smaller shards") from error
    write_durably(stored, data)
    return CheckedExact(exact.num_rollouts, exact.num_tokens, exact.target_fingerprint, exact.behaviour_fingerprint)
