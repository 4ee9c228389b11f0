"""What is summed over the tokens and rollouts of a comparison, and how to read it.

`statistics.py` takes, merges and stores these sums; `comparison_measures.py` makes the measures of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.buckets import BUCKET_EDGES, POSITION_EDGES, BucketSums, BucketTable
from foreshock.measures.clusters import ClusterSums
from foreshock.measures.histograms import LOG_RATIO_GRID
from foreshock.measures.intervals import Interval
from foreshock.measures.log_weights import LogWeights
from foreshock.measures.per_rollout import TAIL_THRESHOLDS, TOKEN_SUMS
from foreshock.measures.sequences import SEQUENCE_SUMS
from foreshock.measures.sums import CompensatedSums

__all__ = ["COUNTS", "EXTREMES", "SUMS", "ComparisonSums"]

COUNTS = (
    "rollouts",
    "measured_rollouts",
    "incomplete_rollouts",
    "generated_tokens",
    "tokens",
    "nonfinite_target",
    "nonfinite_behaviour",
    "zero_tokens",
    "below_threshold",
    "entropy_tokens",
    "turns",
    *(f"tail_{threshold}" for threshold in TAIL_THRESHOLDS),
)
SUMS = TOKEN_SUMS + SEQUENCE_SUMS
# Largest −d, d and |π − μ|: all of them merge by maximum, and −inf is "none yet".
EXTREMES = ("minus_min_d", "max_d", "max_probability_difference")


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonSums:
    """The sums of d = log target − log behaviour (π/μ) over model-generated tokens with two finite log-probs.

    `counts`, `sums` and `extremes` are in the order of COUNTS, SUMS and EXTREMES; `histogram` [2, bins] counts |d| on
    LOG_RATIO_GRID, first of negative and then of positive d.
    """

    counts: NDArray[np.int64]
    sums: CompensatedSums
    extremes: NDArray[np.float64]
    token_weights: LogWeights
    turn_weights: LogWeights
    sequence_weights: LogWeights
    histogram: NDArray[np.int64]
    probabilities: BucketSums
    positions: BucketSums
    clusters: ClusterSums

    def count(self, name: str) -> int:
        """One of COUNTS."""
        return int(self.counts[COUNTS.index(name)])

    def sum(self, name: str) -> float:
        """One of SUMS, as float64."""
        return float(self.sums.value[SUMS.index(name)])

    @property
    def tokens(self) -> int:
        """Model-generated tokens with two finite log-probs: what every token mean is over."""
        return self.count("tokens")

    @property
    def rollouts(self) -> int:
        """Rollouts, those without a measured token included."""
        return self.count("rollouts")

    @property
    def nonfinite_target(self) -> int:
        """Model-generated tokens whose target log-prob is NaN or ±inf."""
        return self.count("nonfinite_target")

    @property
    def nonfinite_behaviour(self) -> int:
        """Model-generated tokens whose behaviour log-prob is NaN or ±inf."""
        return self.count("nonfinite_behaviour")

    def exact_sum(self, name: str) -> Fraction:
        """One of SUMS, with all the digits that were kept."""
        return self.sums.exact(SUMS.index(name))

    def buckets(self) -> BucketTable:
        """The mismatch by the token's probability under μ."""
        return self.probabilities.table(BUCKET_EDGES)

    def position_buckets(self) -> BucketTable:
        """The mismatch by the token's place in the response."""
        return self.positions.table(POSITION_EDGES)

    def interval(self, name: str) -> Interval:
        """The 95 % interval of the token mean `kl` or `k3_kl`, clustered by prompt group (by rollout where none)."""
        sign, column = (-1.0, "d") if name == "kl" else (1.0, name)
        mean = self.sum(column) / self.tokens if self.tokens else math.nan
        found = self.clusters.interval(column, mean, self.tokens)
        if sign > 0:
            return found
        return Interval(-found.mean, -found.high, -found.low, found.clusters)

    def tail(self, threshold: float) -> float:
        """The fraction of tokens with max(ρ, 1/ρ) above any `threshold` > 1, to the width of a histogram bin."""
        if not self.tokens:
            return math.nan
        counts = self.histogram.sum(axis=0)
        first = int(LOG_RATIO_GRID.bins(np.array([math.log(threshold)]))[0]) + 1
        return float(counts[first:].sum()) / self.tokens
