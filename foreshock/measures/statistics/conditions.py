"""Conditions that a mismatch may depend on, each with fixed buckets, so that the tables of any two batches merge.

Bucket i holds edges[i] ≤ value < edges[i + 1]; the last also takes all larger values, the first all smaller ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Half decades of the probability under μ. The first bucket holds all below 1e-8; the last includes probability 1.
BUCKET_EDGES: tuple[float, ...] = (0.0, *(10.0 ** (-8 + half / 2) for half in range(16)), 1.0)

LOW_PROBABILITY = 0.1
"""Tokens whose probability under μ is below this are of low probability; one of BUCKET_EDGES."""

_LOG_EDGES = np.array([math.log(edge) for edge in BUCKET_EDGES[1:-1]])

# Powers of two of the position in the response, from 0: bucket i holds 2^i − 1 ≤ position < 2^(i+1) − 1.
POSITION_EDGES: tuple[float, ...] = tuple(float(2**power - 1) for power in range(22))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: its name, the meaning and unit of its value, and the edges of its buckets, one more than buckets."""

    name: str
    meaning: str
    unit: str
    edges: tuple[float, ...]

    @property
    def size(self) -> int:
        """The number of buckets."""
        return len(self.edges) - 1

    def buckets(self, values: NDArray[np.floating] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the bucket of each value, [T]; values must not be NaN."""
        inner = np.array(self.edges[1:-1])
        return np.searchsorted(inner, np.asarray(values, dtype=np.float64), side="right").astype(np.int64)


_ENTROPY_EDGES = (0.0, *(10.0 ** (-6 + half / 2) for half in range(15)), math.inf)
_LENGTH_EDGES = (*(float(2**power) for power in range(22)), math.inf)
_TURN_EDGES = (*(float(turn) for turn in range(16)), 16.0, 32.0, 64.0, 128.0, math.inf)
_LAG_EDGES = (-math.inf, *(float(lag) for lag in range(5)), 5.0, 9.0, 17.0, 33.0, 65.0, math.inf)

LAG_BUCKETS: dict[str, slice] = {
    **{str(lag): slice(lag + 1, lag + 2) for lag in range(5)},
    "5-8": slice(6, 7),
    "9-16": slice(7, 8),
    "17+": slice(8, None),
}
"""The lags of which k3 is a measure of its own, with their buckets. Lags below 0 are an error of what was logged."""

CONDITIONS: dict[str, Condition] = {
    condition.name: condition
    for condition in (
        Condition("probability", "the token's probability under μ", "1", BUCKET_EDGES),
        Condition("position", "the token's position in the response, counted from 0", "tokens", POSITION_EDGES),
        Condition("turn", "the turn that the token belongs to", "turns", _TURN_EDGES),
        Condition("length", "the number of model-generated tokens of the response", "tokens", _LENGTH_EDGES),
        Condition("entropy", "the entropy of μ at the token", "nats", _ENTROPY_EDGES),
        Condition("lag", "trainer weights version − the version that sampled", "versions", _LAG_EDGES),
    )
}


def probability_buckets(behaviour: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bucket of each finite log μ, [T]: bucket i holds BUCKET_EDGES[i] ≤ μ < BUCKET_EDGES[i + 1]."""
    return np.searchsorted(_LOG_EDGES, np.asarray(behaviour, dtype=np.float64), side="right")


def position_buckets(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each position in the response, [T], counted from 0."""
    exponents: NDArray[np.int64] = ((positions + 1).astype(np.float64).view(np.int64) >> 52) - 1023
    return np.minimum(exponents, len(POSITION_EDGES) - 2)
