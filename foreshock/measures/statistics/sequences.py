"""Sums over whole rollouts: means of per-sequence means, sequence weights, and moments between rollouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import two_product
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS, RolloutSums

Float64 = NDArray[np.float64]

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

# Places of these among TOKEN_SUMS.
_MEANS = np.array([TOKEN_SUMS.index(name) for name in SEQUENCE_MEANS])
_FIRST, _SECOND = (np.array([TOKEN_SUMS.index(pair[place]) for pair in MOMENTS.values()]) for place in (0, 1))


def sequence_sums(rollouts: RolloutSums) -> tuple[Float64, Float64, Float64]:
    """Return the terms [M, len(SEQUENCE_SUMS)] of the M rollouts with measured tokens, their rounding errors, and Σd,
    [M].

    Rounding errors, of the shape of the terms, are kept for the moments only, because those cancel later.
    """
    measured = rollouts.tokens > 0
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
    # All moments at once: for a few rollouts each operation takes longer to begin than to do.
    quotients, remainders = _product_over(table[_FIRST], table[_SECOND], tokens)
    exact = len(columns)
    terms, errors = np.empty((tokens.size, len(SEQUENCE_SUMS))), np.zeros((tokens.size, len(SEQUENCE_SUMS)))
    for place, column in enumerate(columns):
        terms[:, place] = column
    terms[:, exact:], errors[:, exact:] = quotients.T, remainders.T
    return terms, errors, log_weights


def _product_over(a: Float64, b: Float64, n: Float64) -> tuple[Float64, Float64]:
    """Return a·b/n as a compensated pair, of arrays [K, M] and `n` [M]."""
    product, product_error = two_product(a, b)
    with np.errstate(invalid="ignore"):
        quotient = product / n
        back, back_error = two_product(quotient, n)
        error = ((product - back) - back_error + product_error) / n
    return quotient, np.where(np.isfinite(error), error, 0.0)
