"""Per-token formulas. Each takes d = log π − log μ in float64 and gives float64 of the same shape.

μ is the policy that sampled, π the policy that is trained, ρ = exp(d); tokens are drawn from μ. All of them are written
with expm1, never with exp(d) − 1: in float32 `exp(d) − d − 1` is wrong by a factor of two once k3 is below 1e-7. So is
`expm1(d) − d` in float64 once |d| is below 1e-15, and in its tenth digit at 1e-6: k3 near agreement is a series.
A d beyond ±709 overflows to infinity where the formula is that large; no warning is raised.

Many of them need ρ − 1 (`above`) or 1/ρ − 1 (`below`), which are the costly part: who has them hands them over.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "chi2_token",
    "k2_kl",
    "k3_kl",
    "kl",
    "log_ratio",
    "mean_ratio",
    "probability_difference",
    "ratio_minus_one",
    "reverse_chi2_token",
    "token_mult_prob_error",
    "tv_token",
    "verl_chi2_token",
]

Float64 = NDArray[np.float64]

# (e^x − 1 − x)/x² = 1/2! + x/3! + x²/4! + …, exact to the last digit of a float64 for |x| < 2^-5.
_K3_SERIES = tuple(1.0 / math.factorial(power) for power in range(2, 11))
_NEAR_ZERO = 2.0**-5


def log_ratio(target: NDArray[np.float32], behaviour: NDArray[np.float32]) -> Float64:
    """d = log π − log μ in nats, [T]: subtracted in float64, which is exact for log-probs of ordinary size."""
    return np.subtract(target, behaviour, dtype=np.float64)


def ratio_minus_one(d: Float64) -> Float64:
    """ρ − 1, with all its digits near 0."""
    with np.errstate(over="ignore", under="ignore"):
        return np.expm1(d)


def kl(d: Float64) -> Float64:
    """k1 = −d in nats. Its mean estimates KL(μ‖π); single values are negative about as often as not."""
    return -d


def k2_kl(d: Float64) -> Float64:
    """d²/2 in nats. Its mean approximates KL(μ‖π) where d is small."""
    return 0.5 * d * d


def k3_kl(d: Float64, above: Float64 | None = None) -> Float64:
    """k3 = ρ − 1 − d in nats, never negative. Its mean estimates KL(μ‖π) (Schulman, "Approximating KL divergence").

    Unbiased only where π's support lies in μ's and the logged μ is the law that sampled; else E[k3] = KL − (1 − E ρ).
    """
    above = ratio_minus_one(d) if above is None else above
    # expm1(d) − d loses a digit for every factor of ten that d is below 1; the series d²/2 + d³/6 + … loses none.
    near = np.clip(d, -_NEAR_ZERO, _NEAR_ZERO)
    series = np.full_like(near, _K3_SERIES[-1])
    for coefficient in reversed(_K3_SERIES[:-1]):
        series *= near
        series += coefficient
    return np.where(np.abs(d) < _NEAR_ZERO, near * near * series, np.maximum(above - d, 0.0))


def chi2_token(d: Float64, above: Float64 | None = None) -> Float64:
    """(ρ − 1)². Its mean estimates χ²(π‖μ). Blind where π ≪ μ: see `reverse_chi2_token`."""
    above = ratio_minus_one(d) if above is None else above
    with np.errstate(over="ignore", under="ignore"):
        return np.square(above)


def reverse_chi2_token(d: Float64, above: Float64 | None = None, below: Float64 | None = None) -> Float64:
    """(1 − ρ)²/ρ = (ρ − 1)(1 − 1/ρ). Its mean estimates χ²(μ‖π)."""
    above = ratio_minus_one(d) if above is None else above
    below = ratio_minus_one(-d) if below is None else below
    with np.errstate(over="ignore", under="ignore"):
        return above * -below


def tv_token(d: Float64, above: Float64 | None = None) -> Float64:
    """(1 − ρ)⁺, between 0 and 1. Its mean estimates D_TV(π, μ), also where sampling was truncated."""
    above = ratio_minus_one(d) if above is None else above
    return np.maximum(-above, 0.0)


def verl_chi2_token(d: Float64, above: Float64 | None = None) -> Float64:
    """ρ² − 1 = (ρ − 1)² + 2(ρ − 1), verl's form. Estimates χ²(π‖μ) where E ρ = 1; noisy, and often negative."""
    above = ratio_minus_one(d) if above is None else above
    with np.errstate(over="ignore", under="ignore"):
        return above * (above + 2.0)


def mean_ratio(d: Float64) -> Float64:
    """ρ. Its mean is 1 where the logged μ is the law that sampled and covers π."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(d)


def token_mult_prob_error(d: Float64, above: Float64 | None = None, below: Float64 | None = None) -> Float64:
    """exp|d|, NeMo-RL's. 1.0 is ideal, a mean above 1.05 suspicious."""
    above = ratio_minus_one(d) if above is None else above
    below = ratio_minus_one(-d) if below is None else below
    return np.maximum(above, below) + 1.0


def probability_difference(target: NDArray[np.float32], behaviour: NDArray[np.float32]) -> Float64:
    """|π − μ| as probabilities, [T], between 0 and 1, without cancellation. verl's `rollout_probs_diff`."""
    distance = np.abs(log_ratio(target, behaviour))
    likelier = np.minimum(np.maximum(target, behaviour, dtype=np.float64), 709.0)
    return np.asarray(np.exp(likelier) * -np.expm1(-distance))
