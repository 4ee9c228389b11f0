"""Evidence for a rise of a series above its baseline, by an e-detector, and the interval of its onset.

For prewhitened residuals z_t that are N(0, 1) without a rise, ``exp(λ z − λ²/2)`` has expectation 1. The
Shiryaev-Roberts sum over all possible onsets, ``M_t = (M_{t−1} + 1) exp(λ z_t − λ²/2)``, averaged over some λ, then has
expectation at most t at any stopping time t. An alarm at M ≥ A therefore has an average run length to a false alarm of
at least A observations, and the probability of one within n observations is at most n / A (Shin, Ramdas and Rinaldo
2022, "E-detectors: a nonparametric framework for sequential change detection"; mixture over λ: Robbins 1970).
The residuals are capped above, which only lowers M. That the noise is estimated is outside of the guarantee:
`benchmarks/detector` measures the false alarms with estimated noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.early_warning.noise import Noise

SHIFTS = (0.25, 0.5, 1.0, 2.0)
"""The rises λ that are looked for, in standard deviations of the innovations; doubling steps lose little power."""

LARGEST_RESIDUAL = 3.0
"""Residuals count at most this: a single outlier never is enough evidence."""

LIKELIHOOD_DROP = 1.92
"""Half of the 95 % quantile of χ² with one degree of freedom: onsets whose log-likelihood is lower by more are out."""


@dataclass(frozen=True, slots=True)
class Onset:
    """The most likely index of the first value of a rise, and the first and last index that are likely too."""

    index: int
    first: int
    last: int


def residuals_above(values: Sequence[float], baseline: float, baseline_values: int, noise: Noise) -> list[float]:
    """Return the standardised prewhitened residuals of `values[1:]` above the baseline; `values[0]` precedes them.

    A baseline of m values is itself known to one standard deviation in √m of the whitened residuals: it is subtracted.
    """
    phi, allowance = noise.autocorrelation, 1.0 / math.sqrt(baseline_values)
    return [
        ((values[i] - baseline) - phi * (values[i - 1] - baseline)) / noise.innovation - allowance
        for i in range(1, len(values))
    ]


def log_evidence(residuals: Sequence[float]) -> float:
    """Return log M after the residuals, of a detector that starts with the first one; −inf without residuals."""
    if not residuals:
        return -math.inf
    logs = []
    for shift in SHIFTS:
        total = -math.inf
        for residual in residuals:
            # log(M + 1), without overflow.
            above = total + math.log1p(math.exp(-total)) if total > 0.0 else math.log1p(math.exp(total))
            total = above + shift * min(residual, LARGEST_RESIDUAL) - 0.5 * shift**2
        logs.append(total)
    largest = max(logs)
    return largest + math.log(sum(math.exp(each - largest) for each in logs) / len(logs))


def onset_of(residuals: Sequence[float]) -> Onset:
    """Return the most likely onset of a rise that lasts to the last residual, with its 95 % likelihood interval."""
    likelihoods, total = [0.0] * len(residuals), 0.0
    for count, index in enumerate(range(len(residuals) - 1, -1, -1), start=1):
        total += min(residuals[index], LARGEST_RESIDUAL)
        likelihoods[index] = max(total, 0.0) ** 2 / (2.0 * count)
    best = max(likelihoods)
    likely = [index for index, each in enumerate(likelihoods) if each >= best - LIKELIHOOD_DROP]
    return Onset(likelihoods.index(best), likely[0], likely[-1])
