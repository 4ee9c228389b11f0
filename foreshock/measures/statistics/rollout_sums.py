"""The sums of one pass over the tokens of a comparison: the result of both passes.

`passes/numpy_pass.py` is the reference, `passes/compiled.py` the fast one. The sums of a rollout depend only on its
tokens, so they are the same for any split into shards. Integers, ranges and largest values of d agree exactly between
the passes, float sums to 1e-12 of the sum of absolute values.

`sequence_sums` computes from them the terms that are summed over rollouts: per-sequence means, sequence weights, and
moments between rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import LogWeights, summable_parts, two_product
from foreshock.measures.statistics.conditions import BUCKET_SUMS, CONDITIONS, BucketSums
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.tails import TAIL_LEVELS, TAIL_SUMS
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
    "advantage2",
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
    those with d = 0. `weight_sums` [2, WEIGHT_GRID.size, len(TAIL_SUMS)] are sums on the coarser grid of the same |d|,
    with d = 0 in the first bin of BELOW. `tail_counts` [2, len(TAIL_LEVELS)] and `tail_sums` [2, len(TAIL_LEVELS),
    len(TAIL_SUMS)] are over the tokens beyond each level, BELOW first. `conditions` holds a bucket table for each of
    CONDITIONS; `largest_d` and `largest_minus_d` are the LARGEST_VALUES largest d and −d, descending.
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
    tail_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, len(TAIL_LEVELS)), np.int64))
    tail_sums: Float64 = field(default_factory=lambda: np.zeros((2, len(TAIL_LEVELS), len(TAIL_SUMS))))
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, LOG_RATIO_GRID.size), np.int64))
    weight_sums: Float64 = field(default_factory=lambda: np.zeros((2, WEIGHT_GRID.size, len(TAIL_SUMS))))
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

    def sums_by_length(self) -> BucketSums:
        """Return the bucket sums by the number of generated tokens, which all tokens of a rollout share."""
        rows, condition = np.flatnonzero(self.tokens), CONDITIONS["length"]
        return BucketSums.of(
            condition.size,
            condition.buckets(self.generated[rows]),
            [summable_parts(self.column(name)[rows]) for name in BUCKET_SUMS],
            np.maximum(np.abs(self.min_d[rows]), np.abs(self.max_d[rows])),
            self.tokens[rows],
        )


# Per-token sums whose mean over the sequence is averaged over sequences.
SEQUENCE_MEANS = (
    "d",
    "d2",
    "k3_kl",
    "ratio_minus_one",
    "chi2_token",
    "reverse_chi2_token",
    "tv_token",
    "prob_error_minus_one",
)
# S_a·S_b/n of probabilities: with the moments within rollouts they give the moments over all tokens.
MOMENTS = {
    "between_target": ("target_probability", "target_probability"),
    "between_behaviour": ("behaviour_probability", "behaviour_probability"),
    "between_product": ("target_probability", "behaviour_probability"),
    "between_difference": ("abs_probability_difference", "abs_probability_difference"),
}
SEQUENCE_SUMS = (
    *(f"{name}_seq" for name in SEQUENCE_MEANS),
    "abs_mean_d",
    "abs_sum_d",
    "geo_ratio_minus_one",
    "ppl_ratio_minus_one",
    "target_ppl",
    "target_log_ppl",
    "behaviour_ppl",
    "behaviour_log_ppl",
    "squared_weight_minus_one",
    *MOMENTS,
)

# Indices of these in TOKEN_SUMS.
_MEANS = np.array([TOKEN_SUMS.index(name) for name in SEQUENCE_MEANS])
_FIRST, _SECOND = (np.array([TOKEN_SUMS.index(pair[place]) for pair in MOMENTS.values()]) for place in (0, 1))


def sequence_sums(rollouts: RolloutSums) -> tuple[Float64, Float64, Float64]:
    """Return the terms [M, len(SEQUENCE_SUMS)] of the M rollouts with measured tokens, their errors, and Σ d [W].

    Σ d is of the W whole ones, each of whose tokens was measured: a sum over a part of a sequence is not its log ratio.
    The others have 0 as their terms, except for the moments, which are of tokens. Rounding errors, of the shape of the
    terms, are kept only for the moments, because these cancel later.
    """
    measured = rollouts.tokens > 0
    whole = (rollouts.tokens == rollouts.generated)[measured]
    tokens = rollouts.tokens[measured].astype(np.float64)
    # A row for each of TOKEN_SUMS.
    table = np.ascontiguousarray(rollouts.sums[measured].T)
    sums = dict(zip(TOKEN_SUMS, table, strict=True))
    log_weights = sums["d"]
    columns = list(table[_MEANS] / tokens)
    mean_d = log_weights / tokens
    log_ppl = [-sums[name] / tokens for name in ("log_target", "log_behaviour")]
    with np.errstate(over="ignore", under="ignore"):
        columns += [np.abs(mean_d), np.abs(log_weights), np.expm1(mean_d), np.expm1(-mean_d)]
        columns += [column for value in log_ppl for column in (np.exp(value), value)]
        columns.append(np.expm1(2.0 * log_weights))
    # All moments at once: for a few rollouts the overhead of a numpy call exceeds its work.
    quotients, remainders = _product_over(table[_FIRST], table[_SECOND], tokens)
    exact = len(columns)
    terms, errors = np.empty((tokens.size, len(SEQUENCE_SUMS))), np.zeros((tokens.size, len(SEQUENCE_SUMS)))
    for place, column in enumerate(columns):
        terms[:, place] = np.where(whole, column, 0.0)
    terms[:, exact:], errors[:, exact:] = quotients.T, remainders.T
    return terms, errors, log_weights[whole]


def _product_over(a: Float64, b: Float64, n: Float64) -> tuple[Float64, Float64]:
    """Return a·b/n as a compensated pair, of arrays [K, M] and `n` [M]."""
    product, product_error = two_product(a, b)
    with np.errstate(invalid="ignore"):
        quotient = product / n
        back, back_error = two_product(quotient, n)
        error = ((product - back) - back_error + product_error) / n
    return quotient, np.where(np.isfinite(error), error, 0.0)
