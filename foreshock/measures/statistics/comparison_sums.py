"""Sums over the tokens and rollouts of a comparison, and accessors to them.

`comparison_statistics.py` fills, merges and stores them; `estimators/comparison_measures.py` computes the measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.bucket_sums import BucketSums, BucketTable
from foreshock.measures.statistics.clusters import ClusterSums
from foreshock.measures.statistics.compensated_sums import CompensatedSums, LogWeights
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS
from foreshock.measures.statistics.sequences import SEQUENCE_SUMS
from foreshock.measures.statistics.tails import TAIL_SUMS, level_index
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TokenIdSums, TokenIdTable

COUNTS = (
    "rollouts",
    "measured_rollouts",
    "incomplete_rollouts",
    "generated_tokens",
    "tokens",
    "nonfinite_target",
    "nonfinite_behaviour",
    "zero_tokens",
    "entropy_tokens",
    "advantage_tokens",
    "bad_updates",
    "turns",
)
SUMS = TOKEN_SUMS + SEQUENCE_SUMS
# The largest −d, d and |π − μ| of a token, and the largest mean of −d and of d over a sequence. All merge by maximum;
# −inf means that there is no value yet.
EXTREMES = ("minus_min_d", "max_d", "max_probability_difference", "max_log_ppl_diff", "minus_min_log_ppl_diff")

_COUNT_PLACES = {name: place for place, name in enumerate(COUNTS)}
_SUM_PLACES = {name: place for place, name in enumerate(SUMS)}


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonSums:
    """Sums of d = log target − log behaviour (π/μ) over model-generated tokens with two finite log-probs.

    `counts`, `sums` and `extremes` are in the order of COUNTS, SUMS and EXTREMES. `RolloutSums` describes the other
    arrays.
    """

    counts: NDArray[np.int64]
    sums: CompensatedSums
    extremes: NDArray[np.float64]
    token_weights: LogWeights
    turn_weights: LogWeights
    sequence_weights: LogWeights
    histogram: NDArray[np.int64]
    tail_counts: NDArray[np.int64]
    tail_sums: CompensatedSums
    weight_sums: CompensatedSums
    conditions: dict[str, BucketSums]
    token_ids: TokenIdSums
    largest_d: NDArray[np.float64]
    largest_minus_d: NDArray[np.float64]
    clusters: ClusterSums

    def count(self, name: str) -> int:
        """Return one of COUNTS."""
        return int(self.counts[_COUNT_PLACES[name]])

    def extreme(self, name: str) -> float:
        """Return one of EXTREMES; NaN without tokens."""
        return float(self.extremes[EXTREMES.index(name)]) if self.tokens else math.nan

    def sum(self, name: str) -> float:
        """Return one of SUMS as float64."""
        return self.sums.at(_SUM_PLACES[name])

    @property
    def tokens(self) -> int:
        """The number of model-generated tokens with two finite log-probs, the denominator of every token mean."""
        return self.count("tokens")

    @property
    def rollouts(self) -> int:
        """The number of rollouts, including those without a measured token."""
        return self.count("rollouts")

    @property
    def nonfinite_target(self) -> int:
        """The number of model-generated tokens whose target log-prob is NaN, ±inf or a placeholder."""
        return self.count("nonfinite_target")

    @property
    def nonfinite_behaviour(self) -> int:
        """The number of model-generated tokens whose behaviour log-prob is NaN, ±inf or a placeholder."""
        return self.count("nonfinite_behaviour")

    def exact_sum(self, name: str) -> Fraction:
        """Return one of SUMS with all the digits that were kept."""
        return self.sums.exact(_SUM_PLACES[name])

    def exact_ratio(self, name: str) -> tuple[int, int]:
        """Return `exact_sum` as its numerator and its denominator, not reduced."""
        return self.sums.exact_ratio(_SUM_PLACES[name])

    def condition_table(self, name: str) -> BucketTable:
        """Return the mismatch by one of CONDITIONS; the means of an empty bucket are NaN."""
        return self.conditions[name].table(CONDITIONS[name].edges)

    def buckets(self) -> BucketTable:
        """Return the mismatch by the token's probability under μ."""
        return self.condition_table("probability")

    def position_buckets(self) -> BucketTable:
        """Return the mismatch by the token's position in the response."""
        return self.condition_table("position")

    def token_id_table(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdTable:
        """Return the mismatch by token id: the `limit` ids with the largest Σ k3."""
        return self.token_ids.table(limit)

    def tail_count(self, side: int, level: float) -> int:
        """Return the number of tokens with d < −level (BELOW) or d > level (ABOVE), `level` one of TAIL_LEVELS."""
        return int(self.tail_counts[side, level_index(level)])

    def tail_sum(self, side: int, level: float, name: str) -> float:
        """Return one of TAIL_SUMS over those tokens."""
        return self.tail_sums.at((side, level_index(level), TAIL_SUMS.index(name)))

    def tail(self, threshold: float) -> float:
        """Return the fraction of tokens with max(ρ, 1/ρ) > `threshold` (any > 1), to the width of a histogram bin."""
        if not self.tokens:
            return math.nan
        counts = self.histogram.sum(axis=0)
        first = int(LOG_RATIO_GRID.bins(np.array([math.log(threshold)]))[0]) + 1
        return float(counts[first:].sum()) / self.tokens
