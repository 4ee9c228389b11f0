"""Sums over the tokens on one side of d = 0, within and beyond a level of |d|.

At one of TAIL_LEVELS they are exact. Elsewhere the level moves to the nearest edge of WEIGHT_GRID (16 a power of two of
|d|, so by 3 % of |d| at most), and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.exact_sums import exact_sum
from foreshock.measures.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics import ComparisonStatistics
from foreshock.measures.thresholds import ABOVE, BELOW, TAIL_LEVELS, TAIL_SUMS

__all__ = ["Cut", "SideSums", "cut_tokens"]

# Two levels closer than this are the same: no two float32 log-probs tell them apart.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class SideSums:
    """Sums over some tokens of one side; A is 0 where no advantage was logged."""

    tokens: int = 0
    ratio_minus_one: float = 0.0
    chi2: float = 0.0
    advantage: float = 0.0
    advantage_ratio_minus_one: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The tokens of one side within and beyond `level` (in nats of |d|, inf where there is no cut).

    A token at the level itself is within it where `exact_level`; at an edge of the grid it is beyond.
    """

    level: float
    exact_level: bool
    within: SideSums
    beyond: SideSums

    def is_beyond(self, sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether a token of this side with that |d| lies beyond the level; NaN does not."""
        return sizes > self.level if self.exact_level else sizes >= self.level


def cut_tokens(statistics: ComparisonStatistics, side: int, level: float) -> Cut:
    """Cut the tokens of one side (BELOW or ABOVE) at `level` ≥ 0 nats of |d|, or as near as can be."""
    bins = _SideBins(statistics, side)
    if math.isinf(level):
        return Cut(level, True, bins.between(0, WEIGHT_GRID.size), SideSums())
    kept = min(range(len(TAIL_LEVELS)), key=lambda index: abs(TAIL_LEVELS[index] - level))
    # Tokens with d = 0, which are within any level, share the first bin of BELOW.
    edge = max(_nearest_edge(level), 1 if side == BELOW else 0)
    at_edge = WEIGHT_GRID.lower_edge(edge)
    if abs(TAIL_LEVELS[kept] - level) <= max(_SAME, abs(at_edge - level)):
        return bins.cut_at(kept)
    # Beyond 0 lies the whole side ABOVE, without the tokens with d = 0.
    return Cut(at_edge, edge == 0, bins.between(0, edge), bins.between(edge, WEIGHT_GRID.size))


def _nearest_edge(level: float) -> int:
    """The bin of WEIGHT_GRID whose lower edge is nearest."""
    index = int(WEIGHT_GRID.bins(np.array([level]))[0])
    lower, upper = WEIGHT_GRID.lower_edge(index), WEIGHT_GRID.upper_edge(index)
    return index + 1 if upper - level < level - lower else index


class _SideBins:
    """The bins and tails of one side of a comparison."""

    def __init__(self, statistics: ComparisonStatistics, side: int) -> None:
        self._statistics = statistics
        self._side = side
        self._counts = statistics.histogram[side]
        self._high = statistics.weight_sums.high[side]
        self._low = statistics.weight_sums.low[side]

    def between(self, first: int, end: int) -> SideSums:
        """The sums over the bins first ≤ bin < end of WEIGHT_GRID."""
        return SideSums(self._count(first, end), *(self._sum(first, end, column) for column in range(len(TAIL_SUMS))))

    def cut_at(self, kept: int) -> Cut:
        """The cut at one of TAIL_LEVELS."""
        level = TAIL_LEVELS[kept]
        tails = self._statistics.tail_sums
        high, low = tails.high[self._side, kept], tails.low[self._side, kept]
        tokens = int(self._statistics.tail_counts[self._side, kept])
        beyond = SideSums(tokens, *(float(value) for value in high + low))
        # The bin that the level lies in is itself cut: what is within is the rest of the bin.
        index = int(WEIGHT_GRID.bins(np.array([level]))[0])
        whole = self.between(0, index)
        inside = self._count(0, WEIGHT_GRID.size) - tokens - whole.tokens
        rest = [
            exact_sum([*self._parts(index, WEIGHT_GRID.size, column), -float(high[column]), -float(low[column])])
            for column in range(len(TAIL_SUMS))
        ]
        within = SideSums(
            whole.tokens + inside,
            whole.ratio_minus_one + self._possible(rest[0], inside, index, level, squared=False),
            whole.chi2 + self._possible(rest[1], inside, index, level, squared=True),
            whole.advantage + rest[2],
            whole.advantage_ratio_minus_one + rest[3],
        )
        return Cut(level, True, within, beyond)

    def _possible(self, value: float, tokens: int, index: int, level: float, *, squared: bool) -> float:
        """The value, or what `tokens` tokens between the bin's edge and the level can have at most or at least.

        Beside a tail that holds a ratio of 1e10 the difference of two sums has no digit left; the bounds have.
        """
        sign = 1.0 if self._side == ABOVE else -1.0
        ends = [math.expm1(sign * size) for size in (WEIGHT_GRID.lower_edge(index), level)]
        ends = sorted(tokens * (end * end if squared else end) for end in ends)
        # Both sums may have left float64: their difference is NaN then.
        return min(max(value, ends[0]), ends[1]) if not math.isnan(value) else 0.5 * (ends[0] + ends[1])

    def _count(self, first: int, end: int) -> int:
        start, stop = (
            LOG_RATIO_GRID.size if index >= WEIGHT_GRID.size else self._fine_bin(index) for index in (first, end)
        )
        return int(self._counts[start:stop].sum())

    @staticmethod
    def _fine_bin(index: int) -> int:
        return int(LOG_RATIO_GRID.bins(np.array([WEIGHT_GRID.lower_edge(index)]))[0])

    def _sum(self, first: int, end: int, column: int) -> float:
        return exact_sum(self._parts(first, end, column))

    def _parts(self, first: int, end: int, column: int) -> list[float]:
        """High and low words of the sums; of what overflowed, infinity."""
        high, low = self._high[first:end, column], self._low[first:end, column]
        return [*high.tolist(), *low.tolist()]
