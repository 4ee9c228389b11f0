"""Per-token formulas. Each takes d = log π − log μ in float64, in nats, and returns float64 of the same shape.

μ is the sampling policy, π the trained policy, ρ = exp(d); tokens are drawn from μ. All formulas use expm1, never
exp(d) − 1: in float32 `exp(d) − d − 1` is wrong by a factor of two for k3 below 1e-7. In float64 `expm1(d) − d` is
wrong by as much for |d| below 1e-15, and in the tenth digit at 1e-6, so k3 near agreement is computed as a series. For
|d| beyond 709 a formula may overflow to infinity, without a warning.

Many formulas need ρ − 1 (`rho_minus_one`) or 1/ρ − 1 (`inverse_minus_one`), the expensive part: pass them if already
computed.
"""

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

# (e^x − 1 − x)/x² = 1/2! + x/3! + x²/4! + …, exact to the last digit of a float64 for |x| < 2^-5.
_K3_SERIES = tuple(1.0 / math.factorial(power) for power in range(2, 11))
_NEAR_ZERO = 2.0**-5


def log_ratio(target: NDArray[np.float32], behaviour: NDArray[np.float32]) -> Float64:
    """Return d = log π − log μ in nats, [T], subtracted in float64: exact for log-probs of ordinary size."""
    return np.subtract(target, behaviour, dtype=np.float64)


def ratio_minus_one(d: Float64) -> Float64:
    """Return ρ − 1, accurate near 0."""
    with np.errstate(over="ignore", under="ignore"):
        return np.expm1(d)


def k3_kl(d: Float64, rho_minus_one: Float64 | None = None) -> Float64:
    """Return k3 = ρ − 1 − d in nats, never negative. Its mean estimates KL(μ‖π) if μ sampled (Schulman 2020).

    Unbiased only if μ's support contains π's and the logged μ is the sampling distribution; otherwise E[k3] = KL − (1 −
    E ρ).
    """
    rho_minus_one = ratio_minus_one(d) if rho_minus_one is None else rho_minus_one
    # expm1(d) − d loses a digit for every factor of ten that d is below 1; the series d²/2 + d³/6 + … loses none.
    near = np.clip(d, -_NEAR_ZERO, _NEAR_ZERO)
    series = np.full_like(near, _K3_SERIES[-1])
    for coefficient in reversed(_K3_SERIES[:-1]):
        series *= near
        series += coefficient
    return np.where(np.abs(d) < _NEAR_ZERO, near * near * series, np.maximum(rho_minus_one - d, 0.0))


def chi2_token(d: Float64, rho_minus_one: Float64 | None = None) -> Float64:
    """Return (ρ − 1)². Its mean estimates χ²(π‖μ). At most 1 if π ≪ μ; see `reverse_chi2_token`."""
    rho_minus_one = ratio_minus_one(d) if rho_minus_one is None else rho_minus_one
    with np.errstate(over="ignore", under="ignore"):
        return np.square(rho_minus_one)


def reverse_chi2_token(
    d: Float64, rho_minus_one: Float64 | None = None, inverse_minus_one: Float64 | None = None
) -> Float64:
    """Return (1 − ρ)²/ρ = (ρ − 1)(1 − 1/ρ). Its mean estimates χ²(μ‖π)."""
    rho_minus_one = ratio_minus_one(d) if rho_minus_one is None else rho_minus_one
    inverse_minus_one = ratio_minus_one(-d) if inverse_minus_one is None else inverse_minus_one
    with np.errstate(over="ignore", under="ignore"):
        return rho_minus_one * -inverse_minus_one


def tv_token(d: Float64, rho_minus_one: Float64 | None = None) -> Float64:
    """Return (1 − ρ)⁺, between 0 and 1. Its mean estimates D_TV(π, μ), also for truncated sampling."""
    rho_minus_one = ratio_minus_one(d) if rho_minus_one is None else rho_minus_one
    return np.maximum(-rho_minus_one, 0.0)
