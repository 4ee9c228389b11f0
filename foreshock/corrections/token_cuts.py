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
from foreshock.measures.sums import CompensatedSums
from foreshock.measures.thresholds import ABOVE, BELOW, TAIL_LEVELS, TAIL_SUMS

__all__ = ["Cut", "SideBins", "SideSums"]

# Two levels closer than this are the same: no two float32 log-probs tell them apart.
_SAME = 1e-9
# The bin of LOG_RATIO_GRID that each bin of WEIGHT_GRID begins with.
_FINE_BINS = LOG_RATIO_GRID.bins(WEIGHT_GRID.edges()[:-1])


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


def _nearest_edge(level: float) -> int:
    """The bin of WEIGHT_GRID whose lower edge is nearest."""
    index = int(WEIGHT_GRID.bins(np.array([level]))[0])
    lower, upper = WEIGHT_GRID.lower_edge(index), WEIGHT_GRID.upper_edge(index)
    return index + 1 if upper - level < level - lower else index


class SideBins:
    """The bins and tails of one side (BELOW or ABOVE) of a comparison, ready to be cut at many levels."""

    def __init__(self, statistics: ComparisonStatistics, side: int) -> None:
        self._side = side
        # How many tokens lie in the bins before each bin of WEIGHT_GRID: its edges are edges of the finer grid too.
        counted = np.concatenate([[0], np.cumsum(statistics.histogram[side])])
        self._counted = np.append(counted[_FINE_BINS], counted[-1])
        self._sums = CompensatedSums(statistics.weight_sums.high[side], statistics.weight_sums.low[side])
        self._tail_counts = statistics.tail_counts[side]
        self._tails = CompensatedSums(statistics.tail_sums.high[side], statistics.tail_sums.low[side])
        self._cuts: dict[int, Cut] = {}

    def cut(self, level: float) -> Cut:
        """Cut the tokens of this side at `level` ≥ 0 nats of |d|, or as near as can be."""
        if math.isinf(level):
            return Cut(level, True, self._between(0, WEIGHT_GRID.size), SideSums())
        kept = min(range(len(TAIL_LEVELS)), key=lambda index: abs(TAIL_LEVELS[index] - level))
        # Tokens with d = 0, which are within any level, share the first bin of BELOW.
        edge = max(_nearest_edge(level), 1 if self._side == BELOW else 0)
        at_edge = WEIGHT_GRID.lower_edge(edge)
        if abs(TAIL_LEVELS[kept] - level) <= max(_SAME, abs(at_edge - level)):
            if kept not in self._cuts:
                self._cuts[kept] = self._cut_at(kept)
            return self._cuts[kept]
        # Beyond 0 lies the whole side ABOVE, without the tokens with d = 0.
        return Cut(at_edge, edge == 0, self._between(0, edge), self._between(edge, WEIGHT_GRID.size))

    def _between(self, first: int, end: int) -> SideSums:
        """The sums over the bins first ≤ bin < end of WEIGHT_GRID."""
        sums = self._sums.value[first:end].sum(axis=0)
        return SideSums(int(self._counted[end] - self._counted[first]), *sums.tolist())

    def _cut_at(self, kept: int) -> Cut:
        """The cut at one of TAIL_LEVELS."""
        level = TAIL_LEVELS[kept]
        tokens = int(self._tail_counts[kept])
        beyond = SideSums(tokens, *self._tails.value[kept].tolist())
        # The bin that the level lies in is itself cut: what is within is the rest of the bin.
        index = int(WEIGHT_GRID.bins(np.array([level]))[0])
        whole = self._between(0, index)
        inside = int(self._counted[-1]) - tokens - whole.tokens
        rest = [self._rest(kept, index, column) for column in range(len(TAIL_SUMS))]
        within = SideSums(
            whole.tokens + inside,
            whole.ratio_minus_one + self._possible(rest[0], inside, index, level, squared=False),
            whole.chi2 + self._possible(rest[1], inside, index, level, squared=True),
            whole.advantage + rest[2],
            whole.advantage_ratio_minus_one + rest[3],
        )
        return Cut(level, True, within, beyond)

    def _rest(self, kept: int, index: int, column: int) -> float:
        """The sum over what the tail leaves of the bins from `index` on."""
        words = (self._sums.high[index:, column], self._sums.low[index:, column])
        tail = (-self._tails.high[kept, column], -self._tails.low[kept, column])
        return exact_sum([*words[0].tolist(), *words[1].tolist(), *(float(word) for word in tail)])

    def _possible(self, value: float, tokens: int, index: int, level: float, *, squared: bool) -> float:
        """The value, or what `tokens` tokens between the bin's edge and the level can have at most or at least.

        Beside a tail that holds a ratio of 1e10 the difference of two sums has no digit left; the bounds have.
        """
        sign = 1.0 if self._side == ABOVE else -1.0
        ends = [math.expm1(sign * size) for size in (WEIGHT_GRID.lower_edge(index), level)]
        ends = sorted(tokens * (end * end if squared else end) for end in ends)
        # Both sums may have left float64: their difference is NaN then.
        return min(max(value, ends[0]), ends[1]) if not math.isnan(value) else 0.5 * (ends[0] + ends[1])
