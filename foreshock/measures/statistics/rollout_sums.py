"""The sums of one pass over the tokens of a comparison: the result of both passes.

`passes/numpy_pass.py` is the reference, `passes/compiled.py` the fast one. The sums of a rollout depend only on its
tokens, so they are the same for any split into shards. Integers, ranges and largest values of d agree exactly between
the passes, float sums to 1e-12 of the sum of absolute values.

A rollout is whole if each of its model-generated tokens was measured. Only whole rollouts have a ratio of their
sequence and of its turns: a sum over a part of the tokens is not its logarithm. `sequence_sums` computes the terms that
are summed over them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.conditions import BUCKET_SUMS, CONDITIONS, BucketSums
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.moments import Moments
from foreshock.measures.statistics.tails import REGIONS, TAIL_SUMS
from foreshock.measures.statistics.token_ids import TokenIdSums

Float64 = NDArray[np.float64]

# Terms summed over the tokens of each rollout. ρ − 1 instead of ρ keeps the digits near agreement.
TOKEN_SUMS = (
    "d",
    "abs_d",
    "d2",
    "k3_kl",
    "ratio_minus_one",
    "chi2_token",
    "reverse_chi2_token",
    "tv_token",
    "prob_error_minus_one",
    "log_target",
    "log_behaviour",
    "target_probability",
    "behaviour_probability",
    "abs_probability_difference",
    "within_target",
    "within_behaviour",
    "within_product",
    "within_difference",
    "entropy",
    "surprisal",
    # A is the advantage; tokens without a finite advantage add 0 to these.
    "advantage",
    "advantage_d",
    "positive_advantage_skew",  # Σ A·(ρ − 1) over A > 0
    "negative_advantage_skew",  # Σ A·(ρ − 1) over A < 0
    "d_with_advantage",  # Σ d of the tokens that have an advantage
)

_PLACES = {name: place for place, name in enumerate(TOKEN_SUMS)}

# DPPO calls an update bad if A < 0 and μ − π is at least this.
DPPO_PROBABILITY_GAP = 0.5


@dataclass(slots=True, eq=False)
class RolloutSums:
    """Sums per rollout, and sums over all rollouts together.

    Per rollout, [N]: the measured `tokens`, the `generated` ones, `sums` [N, len(TOKEN_SUMS)], the range of d (NaN
    without measured tokens), and the numbers of tokens with an entropy, of tokens with an advantage, and of turns.

    Over all rollouts: `histogram` [2, LOG_RATIO_GRID.size] counts |d| of negative and of positive d, `zero_tokens`
    those with d = 0. `region_tokens` [2, REGIONS] and `region_sums` [2, REGIONS, len(TAIL_SUMS)] are over the tokens of
    each region (see `tails`), BELOW first. `conditions` holds a bucket table for each of CONDITIONS; `largest_d` and
    `largest_minus_d` are the LARGEST_VALUES largest d and −d, descending. `turn_weights` are those of whole rollouts.
    """

    tokens: NDArray[np.int64]
    generated: NDArray[np.int64]
    sums: Float64
    min_d: Float64
    max_d: Float64
    entropy_tokens: NDArray[np.int64]
    advantage_tokens: NDArray[np.int64]
    turns: NDArray[np.int64]
    nonfinite_target: int = 0
    nonfinite_behaviour: int = 0
    zero_tokens: int = 0
    bad_updates: int = 0  # tokens with A < 0 and μ − π ≥ DPPO_PROBABILITY_GAP
    max_probability_difference: float = 0.0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, LOG_RATIO_GRID.size), np.int64))
    region_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, REGIONS), np.int64))
    region_sums: Float64 = field(default_factory=lambda: np.zeros((2, REGIONS, len(TAIL_SUMS))))
    conditions: dict[str, BucketSums] = field(
        default_factory=lambda: {name: BucketSums.empty(condition.edges) for name, condition in CONDITIONS.items()}
    )
    token_ids: TokenIdSums = field(default_factory=TokenIdSums.empty)
    largest_d: Float64 = field(default_factory=lambda: np.zeros(0))
    largest_minus_d: Float64 = field(default_factory=lambda: np.zeros(0))
    token_weights: LogWeights = field(default_factory=LogWeights)
    turn_weights: LogWeights = field(default_factory=LogWeights)

    @classmethod
    def empty(cls, rollouts: int) -> RolloutSums:
        """Return the sums of `rollouts` rollouts without tokens."""
        return cls(
            tokens=np.zeros(rollouts, np.int64),
            generated=np.zeros(rollouts, np.int64),
            sums=np.zeros((rollouts, len(TOKEN_SUMS))),
            min_d=np.full(rollouts, math.nan),
            max_d=np.full(rollouts, math.nan),
            entropy_tokens=np.zeros(rollouts, np.int64),
            advantage_tokens=np.zeros(rollouts, np.int64),
            turns=np.zeros(rollouts, np.int64),
        )

    def column(self, name: str) -> Float64:
        """Return the sums of one of TOKEN_SUMS, [N]."""
        return self.sums[:, _PLACES[name]]

    def whole(self) -> NDArray[np.bool_]:
        """Return whether each rollout is whole, [N]; one without tokens is not."""
        whole: NDArray[np.bool_] = (self.tokens > 0) & (self.tokens == self.generated)
        return whole

    def sums_by_length(self) -> BucketSums:
        """Return the bucket sums by the number of generated tokens, which all tokens of a rollout share."""
        rows, condition = np.flatnonzero(self.tokens), CONDITIONS["length"]
        return BucketSums.of(
            condition.size,
            condition.buckets(self.generated[rows]),
            [self.column(name)[rows] for name in BUCKET_SUMS],
            np.maximum(np.abs(self.min_d[rows]), np.abs(self.max_d[rows])),
            self.tokens[rows],
        )


SEQUENCE_SUMS = (
    "mean_d",
    "mean_k3",
    "sum_k3",
    "abs_mean_d",
    "abs_sum_d",
    "geo_ratio_minus_one",
    "ppl_ratio_minus_one",
    "target_ppl",
    "target_log_ppl",
    "behaviour_ppl",
    "behaviour_log_ppl",
    "squared_weight_minus_one",
)


def sequence_sums(rollouts: RolloutSums, chosen: NDArray[np.bool_]) -> Float64:
    """Return the terms [W, len(SEQUENCE_SUMS)] of the W `chosen` rollouts, which are whole."""
    tokens = rollouts.tokens[chosen]
    sum_d, sum_k3, log_target, log_behaviour = (
        rollouts.column(name)[chosen] for name in ("d", "k3_kl", "log_target", "log_behaviour")
    )
    mean_d, target, behaviour = sum_d / tokens, -log_target / tokens, -log_behaviour / tokens
    with np.errstate(over="ignore", under="ignore"):
        terms = (
            mean_d,
            sum_k3 / tokens,
            sum_k3,
            np.abs(mean_d),
            np.abs(sum_d),
            np.expm1(mean_d),
            np.expm1(-mean_d),
            np.exp(target),
            target,
            np.exp(behaviour),
            behaviour,
            np.expm1(2.0 * sum_d),
        )
    return np.stack(terms, axis=1)


def probability_moments(rollouts: RolloutSums) -> tuple[Moments, Moments]:
    """Return the moments over tokens of the probabilities π and μ, and of |π − μ|."""

    def table(*names: str) -> Float64:
        return np.stack([rollouts.column(name) for name in names], axis=1)

    products = table("within_target", "within_product", "within_product", "within_behaviour").reshape(-1, 2, 2)
    both = Moments.of_parts(rollouts.tokens, table("target_probability", "behaviour_probability"), products)
    difference = table("within_difference").reshape(-1, 1, 1)
    return both, Moments.of_parts(rollouts.tokens, table("abs_probability_difference"), difference)
