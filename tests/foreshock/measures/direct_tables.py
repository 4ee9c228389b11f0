"""Direct evaluation of tables and tails: loops and math.fsum over the tokens of `direct.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from foreshock.measures.statistics.conditions import BUCKET_EDGES, CONDITIONS
from foreshock.measures.statistics.tails import TAIL_LEVELS
from tests.foreshock.measures.direct import Sequence, Token, k3

VALUE_OF: dict[str, Callable[[Token], float]] = {
    "probability": lambda token: token.log_behaviour,
    "position": lambda token: token.position,
    "turn": lambda token: token.turn,
    "length": lambda token: token.length,
    "entropy": lambda token: token.entropy,
    "lag": lambda token: token.lag,
}


class DirectSums(NamedTuple):
    """The sums of |d|, d, k3 and |π − μ| over some tokens, those of absolute values, and the largest |d|."""

    tokens: int
    sums: list[float]
    largest: float

    @classmethod
    def of(cls, tokens: Sequence) -> DirectSums:
        terms = [[abs(t.d) for t in tokens], [t.d for t in tokens], [k3(t.d) for t in tokens], [t.gap for t in tokens]]
        return cls(len(tokens), [math.fsum(term) for term in terms], max(terms[0], default=0.0))


def direct_condition(name: str, tokens: Sequence) -> list[DirectSums]:
    """Return the sums of each bucket of a condition."""
    edges = CONDITIONS[name].edges
    if name == "probability":
        edges = (-math.inf, *(math.log(edge) for edge in BUCKET_EDGES[1:-1]), math.inf)
    buckets: dict[int, Sequence] = defaultdict(list)
    for token in tokens:
        value = VALUE_OF[name](token)
        if math.isfinite(value):
            # The first bucket also takes all smaller values, the last all larger ones.
            buckets[sum(value >= edge for edge in edges[1:-1])].append(token)
    return [DirectSums.of(buckets[index]) for index in range(len(edges) - 1)]


def direct_token_ids(tokens: Sequence) -> dict[int, DirectSums]:
    """Return the sums of each token id, by rising id."""
    by_id: dict[int, Sequence] = defaultdict(list)
    for token in tokens:
        by_id[token.token_id].append(token)
    return {token_id: DirectSums.of(by_id[token_id]) for token_id in sorted(by_id)}


def beyond(tokens: Sequence, side: int, level: float) -> Sequence:
    """Return the tokens with d < −level (side 0) or d > level (side 1)."""
    return [token for token in tokens if (token.d > level if side else token.d < -level)]


def tail_terms(token: Token) -> tuple[float, float, float, float]:
    """Return ρ − 1, (ρ − 1)², A and A·(ρ − 1); A is 0 if there is none."""
    advantage = token.advantage if math.isfinite(token.advantage) else 0.0
    above = math.expm1(token.d)
    return above, above * above, advantage, advantage * above


def direct_tails(tokens: Sequence) -> tuple[list[list[int]], list[list[list[float]]], list[list[list[float]]]]:
    """Return per side and level the number of tokens beyond, their sums, and the sums of absolute values."""
    cells = [[beyond(tokens, side, level) for level in TAIL_LEVELS] for side in (0, 1)]
    counts = [[len(cell) for cell in side] for side in cells]
    sums, absolute = (
        [[[math.fsum(change(tail_terms(t)[k]) for t in cell) for k in range(4)] for cell in side] for side in cells]
        for change in (float, abs)
    )
    return counts, sums, absolute
