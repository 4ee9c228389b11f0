"""The mismatch by token id: exact sums for every id while they are in memory, the 512 that matter most when stored.

What a cut leaves out is bounded: an id that a stored part does not name has at most that part's `bound` of Σ k3 in it.
Merging never cuts, so that any order of merging gives the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.sums import CompensatedSums

__all__ = ["KEPT_TOKEN_IDS", "TOKEN_ID_SUMS", "TokenIdSums"]

TOKEN_ID_SUMS = ("d", "abs_d", "k3_kl")
KEPT_TOKEN_IDS = 512


@dataclass(frozen=True, slots=True, eq=False)
class TokenIdSums:
    """`ids` [V] rising, `tokens` [V] and `sums` [V, 3] of TOKEN_ID_SUMS; `bound` is what a token id that is not named
    can have of Σ k3 in the parts that were cut, and `covered` [V] how much of `bound` is of parts that name the id: the
    true Σ k3 of an id lies between its sum and its sum + bound − covered.
    """

    ids: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sums: CompensatedSums
    covered: NDArray[np.float64]
    bound: float = 0.0

    @classmethod
    def empty(cls) -> TokenIdSums:
        """No tokens."""
        return cls(
            np.zeros(0, np.int64), np.zeros(0, np.int64), CompensatedSums.zeros(0, len(TOKEN_ID_SUMS)), np.zeros(0)
        )
