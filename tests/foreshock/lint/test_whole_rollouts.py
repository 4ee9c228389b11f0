"""Digests of rollouts, by which copies are found."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.lint import collect_evidence
from foreshock.lint.checks.duplicates import Hashes, Repeats
from foreshock.rollouts import RolloutBatch


def hashes_of(*lengths: int) -> Hashes:
    """Return the hashes of rollouts with so many tokens, each numbered from 1."""
    tokens = np.concatenate([np.arange(1, length + 1) for length in lengths])
    batch = RolloutBatch.from_arrays(
        [f"s{length}" for length in lengths],
        prompt_offsets=np.arange(len(lengths) + 1),
        prompt_token_ids=np.ones(len(lengths), np.int64),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        response_token_ids=tokens,
        rollout_log_probs=(-0.25 * tokens).astype(np.float32),
    )
    return collect_evidence(batch)[Repeats].hashes


@pytest.mark.parametrize("other", [3, 4096, 4097, 9000])
def test_a_rollouts_hash_does_not_depend_on_the_lengths_beside_it(other: int) -> None:
    both = hashes_of(50, other)
    assert both.contents[:1] == hashes_of(50).contents
    assert both.contents[1:] == hashes_of(other).contents
    assert both.contents[0] != both.contents[1]
