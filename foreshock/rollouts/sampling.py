"""Samples of rollouts that keep the distribution of lengths."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def select_rollouts(
    sample_ids: Sequence[str], lengths: NDArray[np.int64], most: int | None, seed: str | None = None
) -> NDArray[np.int64]:
    """Return the ascending row indices of at most `most` of N rollouts; all N if `most` is None or not below N.

    A systematic sample over the rollouts sorted by length: every part of the length distribution has its proportion.
    The sample depends only on ids, lengths and seed: the same request always selects the same rollouts. With a seed
    every rollout has the same chance; without a seed the middle of each part is taken.
    """
    total = len(sample_ids)
    if most is None or most >= total:
        return np.arange(total, dtype=np.int64)
    # Equal lengths are put in an order that does not depend on how a trainer numbers its prompts.
    shuffled = [hashlib.sha256(f"{seed or ''}{sample_id}".encode()).hexdigest() for sample_id in sample_ids]
    order = np.lexsort((np.asarray(shuffled), lengths))
    # The place in each part at which a rollout is taken, from 0 to below 1.
    digest = hashlib.sha256((seed or "").encode()).digest()
    phase = 0.5 if seed is None else (int.from_bytes(digest[:8], "little") >> 11) / float(1 << 53)
    places = ((np.arange(most) + phase) * total / most).astype(np.int64)
    return np.sort(order[places]).astype(np.int64)
