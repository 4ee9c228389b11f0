"""Read a file of the store as its kind is written. Runs in a decoder process."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.digests import rollout_set_digest
from foreshock.rollouts import decode_exact, decode_rollouts, decode_scores
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.tokens import StoredFile


@dataclass(frozen=True, slots=True)
class Contents:
    """The numbers of rollouts and response tokens of a file, and the digest of its sample ids."""

    rollouts: int
    tokens: int
    rollout_set_digest: str


def read_contents(file: StoredFile, kind: str) -> Contents:
    """Return the contents of a file; raises FileNotFoundError, and RolloutsError if a page or a value is damaged."""
    data = file.read_bytes()
    if kind == "rollouts":
        batch = decode_rollouts(data, stored_limits())
        return Contents(batch.num_rollouts, batch.num_tokens, rollout_set_digest(batch.sample_ids))
    shard = decode_scores(data, stored_limits()) if kind == "scores" else decode_exact(data, stored_limits())
    return Contents(shard.num_rollouts, shard.num_tokens, rollout_set_digest(shard.sample_ids))
