"""Token corrections, from sums over three regions: below the lower bound, between the bounds, above the upper bound.

Every sum is of ρ − 1, which keeps its precision near ρ = 1. E|w − ρ|, E[(w − ρ)·A] and the moments of w − 1 follow from
the sums of the three regions.

The sums of a region are exact at one of TAIL_LEVELS, and if no token lies between the level and the nearest edge of
WEIGHT_GRID. Otherwise the level moves to that edge, by at most 3 % of |d| between 2^-12 and 128 (16 edges per power of
two), and the cut reports the level used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.catalogue import Correction, Evaluation, Threshold, WeightMoments
from foreshock.corrections.sequence_level import Sequences, exact_sum
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.compensated_sums import CompensatedSums
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.tails import ABOVE, BELOW, TAIL_LEVELS, TAIL_SUMS

# Two levels closer than this are the same: differences of float32 log-probs do not resolve them.
_SAME = 1e-9
# The first bin of LOG_RATIO_GRID in each bin of WEIGHT_GRID, and the end of the last one.
_FINE_BINS = np.append(LOG_RATIO_GRID.bins(WEIGHT_GRID.edges()[:-1]), LOG_RATIO_GRID.size)
_FINE_EDGES = LOG_RATIO_GRID.edges()


@dataclass(frozen=True, slots=True)
class SideSums:
    """Sums over some tokens of one side; the advantage A counts as 0 if none was logged."""

    tokens: int = 0
    ratio_minus_one: float = 0.0
    chi2: float = 0.0
    advantage: float = 0.0
    advantage_ratio_minus_one: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The tokens of one side within and beyond `level`, in nats of |d|; inf if there is no cut.

    A token exactly at the level is within if `exact_level` is True, else beyond.
    """

    level: float
    exact_level: bool
    within: SideSums
    beyond: SideSums

    def is_beyond(self, sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return True for each |d| of this side that lies beyond the level; False for NaN."""
        return sizes > self.level if self.exact_level else sizes >= self.level


def _nearest_edge(level: float) -> int:
    """Return the bin of WEIGHT_GRID whose lower edge is nearest."""
    index = int(WEIGHT_GRID.bins(np.array([level]))[0])
    lower, upper = WEIGHT_GRID.lower_edge(index), WEIGHT_GRID.upper_edge(index)
    return index + 1 if upper - level < level - lower else index


class SideBins:
    """The bins and tails of one side (BELOW or ABOVE) of a comparison, prepared for cuts at many levels."""

    def __init__(self, statistics: ComparisonStatistics, side: int) -> None:
        self._side = side
        self._histogram = statistics.histogram[side]
        # The tokens before each bin of the finer grid, which has all edges of WEIGHT_GRID.
        self._before = np.concatenate([[0], np.cumsum(self._histogram)])
        self._counted = self._before[_FINE_BINS]
        self._sums = CompensatedSums(statistics.weight_sums.high[side], statistics.weight_sums.low[side])
        self._tail_counts = statistics.tail_counts[side]
        self._tails = CompensatedSums(statistics.tail_sums.high[side], statistics.tail_sums.low[side])
        self._cuts: dict[int, Cut] = {}

    @cached_property
    def whole(self) -> SideSums:
        """The sums over all tokens of this side."""
        return self._between(0, WEIGHT_GRID.size)

    def cut(self, level: float) -> Cut:
        """Cut the tokens of this side at `level` ≥ 0 nats of |d|, or at the nearest level with known sums."""
        if math.isinf(level):
            return Cut(level, True, self.whole, SideSums())
        kept = min(range(len(TAIL_LEVELS)), key=lambda index: abs(TAIL_LEVELS[index] - level))
        # The first bin of BELOW also holds the tokens with d = 0, which are within any level.
        edge = max(_nearest_edge(level), 1 if self._side == BELOW else 0)
        at_edge = WEIGHT_GRID.lower_edge(edge)
        if abs(TAIL_LEVELS[kept] - level) <= max(_SAME, abs(at_edge - level)):
            if kept not in self._cuts:
                self._cuts[kept] = self._cut_at(kept)
            return self._cuts[kept]
        within, beyond = self._between(0, edge), self._between(edge, WEIGHT_GRID.size)
        if self._none_between(level, edge):
            return Cut(level, True, within, beyond)
        # At level 0 the whole side ABOVE is beyond; tokens with d = 0 are in BELOW.
        return Cut(at_edge, edge == 0, within, beyond)

    def _none_between(self, level: float, edge: int) -> bool:
        """Return True if no token lies between the level and the lower edge of a bin of WEIGHT_GRID."""
        at_level, at_edge = int(LOG_RATIO_GRID.bins(np.array([level]))[0]), int(_FINE_BINS[edge])
        return bool(self._before[max(at_level + 1, at_edge)] == self._before[min(at_level, at_edge)])

    def _between(self, first: int, end: int) -> SideSums:
        """Return the sums over the bins first ≤ bin < end of WEIGHT_GRID."""
        sums = self._sums.value[first:end].sum(axis=0)
        return SideSums(int(self._counted[end] - self._counted[first]), *sums.tolist())

    def _cut_at(self, kept: int) -> Cut:
        """Return the cut at one of TAIL_LEVELS."""
        level = TAIL_LEVELS[kept]
        tokens = int(self._tail_counts[kept])
        beyond = SideSums(tokens, *self._tails.value[kept].tolist())
        # The level splits bin `index`: the part within is the sum from this bin on, minus the tail.
        index = int(WEIGHT_GRID.bins(np.array([level]))[0])
        whole = self._between(0, index)
        inside = int(self._counted[-1]) - tokens - whole.tokens
        rest = [self._rest(kept, index, column) for column in range(len(TAIL_SUMS))]
        within = SideSums(
            whole.tokens + inside,
            whole.ratio_minus_one + self._clamped(rest[0], inside, index, level, column=0),
            whole.chi2 + self._clamped(rest[1], inside, index, level, column=1),
            whole.advantage + rest[2],
            whole.advantage_ratio_minus_one + rest[3],
        )
        return Cut(level, True, within, beyond)

    def _rest(self, kept: int, index: int, column: int) -> float:
        """Return the sum over the bins from `index` on, minus the tail."""
        parts = (self._sums.high[index:, column], self._sums.low[index:, column])
        tail = (-self._tails.high[kept, column], -self._tails.low[kept, column])
        return exact_sum([*parts[0].tolist(), *parts[1].tolist(), *(float(part) for part in tail)])

    def _clamped(self, value: float, tokens: int, index: int, level: float, *, column: int) -> float:
        """Return `value` clamped to the range that `tokens` tokens between the bin's edge and the level can have.

        If the tail holds a ratio of 1e10, the difference of two sums has no correct digit. The sum over the bin and the
        counts in the bins of the finer grid bound the result.
        """
        first, end = int(_FINE_BINS[index]), int(_FINE_BINS[index + 1])
        cut = int(LOG_RATIO_GRID.bins(np.array([level]))[0])
        counts, edges = self._histogram[first:end], _FINE_EDGES[first : end + 1]
        last = tokens - int(counts[: cut - first].sum())
        least, most = self._range([*counts[: cut - first], last], [*edges[: cut + 1 - first], level], column)
        beyond = [counts[cut - first] - last, *counts[cut + 1 - first :]]
        least_beyond, most_beyond = self._range(beyond, [level, *edges[cut + 1 - first :]], column)
        whole = float(self._sums.value[index, column])
        least, most = max(least, whole - most_beyond), min(most, whole - least_beyond)
        # NaN if both sums overflowed.
        return min(max(value, least), most) if not math.isnan(value) else 0.5 * (least + most)

    def _range(self, counts: Sequence[int], edges: Sequence[float], column: int) -> tuple[float, float]:
        """Return the range of Σ (ρ − 1) (column 0) or Σ (ρ − 1)² (1) of `counts` tokens between `edges`."""
        values = np.expm1((1.0 if self._side == ABOVE else -1.0) * np.asarray(edges)) ** (column + 1)
        sums = np.dot(counts, values[:-1]), np.dot(counts, values[1:])
        return float(min(sums)), float(max(sums))


# Below this mean of w², 1 + 2·E[w − 1] + E[(w − 1)²] loses too many digits to cancellation.
_SMALLEST_SQUARE = 1e-9

# The corrections that give a kept token the weight 1 instead of ρ.
_WITHOUT_RATIO = frozenset({"none", "token_mask"})


class TokenSums:
    """The tokens of a comparison, prepared for cuts at many thresholds."""

    def __init__(self, statistics: ComparisonStatistics) -> None:
        self.statistics = statistics
        self.below, self.above = SideBins(statistics, BELOW), SideBins(statistics, ABOVE)


def evaluate_tokens(
    correction: Correction, threshold: Threshold, tokens: TokenSums, sequences: Sequences
) -> Evaluation:
    """Return the effect of a token correction; `tokens` and `sequences` are of the same rollouts, and not empty."""
    statistics = tokens.statistics
    below, above = tokens.below.cut(-threshold.log_lower), tokens.above.cut(threshold.log_upper)
    used = Threshold(_used(threshold.lower, below, -1.0), _used(threshold.upper, above, 1.0))
    weights = _Weights(correction, used, statistics, below, above, (tokens.below.whole, tokens.above.whole))
    touched = above.is_beyond(sequences.columns["max_d"]) | below.is_beyond(-sequences.columns["min_d"])
    beyond = (below.beyond.tokens + above.beyond.tokens) / statistics.tokens
    drops = correction.effect == "dropped"
    distortion = weights.distortion()
    return Evaluation(
        correction,
        threshold,
        used,
        kept_tokens=1.0 - beyond if drops else 1.0,
        kept_sequences=float((~touched).sum() / touched.size) if drops else 1.0,
        touched_tokens=beyond,
        weights=weights.moments(),
        distortion=distortion,
        uncorrected_distortion=weights.uncorrected_distortion(),
        token_distortion=distortion,
        advantage_distortion=weights.advantage_distortion(),
        affected=sequences.affected(touched),
        notes=_notes(threshold, used),
    )


def _used(asked: float | None, cut: Cut, sign: float) -> float | None:
    if asked is None:
        return None
    used = math.exp(sign * cut.level)
    return asked if math.isclose(used, asked, rel_tol=1e-9) else used


def _notes(asked: Threshold, used: Threshold) -> tuple[str, ...]:
    if asked == used:
        return ()
    return (f"tokens are counted at the nearest edge of a histogram: these figures are for {used}, not {asked}",)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights that a token correction would give, as sums over the three regions."""

    correction: Correction
    used: Threshold
    statistics: ComparisonStatistics
    below: Cut
    above: Cut
    sides: tuple[SideSums, SideSums]

    @property
    def _keeps_ratio(self) -> bool:
        return self.correction.name not in _WITHOUT_RATIO

    @property
    def _beyond(self) -> tuple[SideSums, SideSums]:
        return self.below.beyond, self.above.beyond

    def distortion(self) -> float:
        """Return E|w − ρ| over tokens."""
        # If w = 1, the term is |1 − ρ|; ρ − 1 has the sign of d.
        kept = 0.0 if self._keeps_ratio else self.above.within.ratio_minus_one - self.below.within.ratio_minus_one
        if self.correction.effect == "truncated":
            beyond = self._cut_off()
        else:
            beyond = exact_sum(side.ratio_minus_one + side.tokens for side in self._beyond)
        return (kept + beyond) / self.statistics.tokens

    def uncorrected_distortion(self) -> float:
        """Return E|1 − ρ| over tokens."""
        below, above = self.sides
        return (above.ratio_minus_one - below.ratio_minus_one) / self.statistics.tokens

    def advantage_distortion(self) -> float:
        """Return E[(w − ρ)·A] over tokens with an advantage; NaN if there are none."""
        tokens = self.statistics.count("advantage_tokens")
        if not tokens:
            return math.nan
        if self.correction.effect == "truncated":
            side = self.above.beyond
            total = (self._cap - 1.0) * side.advantage - side.advantage_ratio_minus_one
        else:
            # If w = 1, w − ρ is 1 − ρ; for a dropped token it is 1 less.
            changed = self._beyond if self._keeps_ratio else self.sides
            dropped = (side.advantage for side in self._beyond)
            total = 0.0 - exact_sum([*(side.advantage_ratio_minus_one for side in changed), *dropped])
        return total / tokens

    def moments(self) -> WeightMoments:
        """Return mean, variance and effective fraction of w."""
        tokens = self.statistics.tokens
        first = second = 0.0
        if self._keeps_ratio:
            first = self.above.within.ratio_minus_one + self.below.within.ratio_minus_one
            second = self.above.within.chi2 + self.below.within.chi2
        beyond = sum(side.tokens for side in self._beyond)
        weight = self._cap - 1.0 if self.correction.effect == "truncated" else -1.0
        if beyond:
            first += weight * beyond
            second += weight * weight * beyond
        # Per token: E[w − 1] and E[(w − 1)²].
        first, second = first / tokens, second / tokens
        total, square = 1.0 + first, 1.0 + 2.0 * first + second
        effective = total * total / square if _SMALLEST_SQUARE < square < math.inf else math.nan
        if self._keeps_ratio and self.correction.effect == "none":
            effective = self.statistics.token_weights.effective_fraction()
        variance = max(second - first * first, 0.0) if math.isfinite(second) else math.inf
        return WeightMoments(total, variance, effective)

    @property
    def _cap(self) -> float:
        return self.used.upper if self.used.upper is not None else math.inf

    def _cut_off(self) -> float:
        """Return Σ (ρ − C) beyond the cap C."""
        side = self.above.beyond
        return side.ratio_minus_one - (self._cap - 1.0) * side.tokens if side.tokens else 0.0
