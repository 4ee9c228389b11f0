"""Which rollouts of a step a probe scores: all, or a sample that keeps the spread of lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def select_rollouts(sample_ids: Sequence[str], lengths: NDArray[np.int64], most: int | None) -> NDArray[np.int64]:
    """Row indices, ascending, of at most `most` of N rollouts; all where `most` is None or not smaller than N.

    A systematic sample over the rollouts sorted by length: every part of the length distribution is there in its
    proportion. It depends on ids and lengths alone, so the same request always means the same rollouts.
    """
    total = len(sample_ids)
    if most is None or most >= total:
        return np.arange(total, dtype=np.int64)
    # Equal lengths are put in an order that has nothing to do with how a trainer numbers its prompts.
    shuffled = [hashlib.sha256(sample_id.encode()).hexdigest() for sample_id in sample_ids]
    order = np.lexsort((np.asarray(shuffled), lengths))
    places = ((np.arange(most) + 0.5) * total / most).astype(np.int64)
    return np.sort(order[places]).astype(np.int64)
