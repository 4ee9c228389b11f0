"""Evaluate all bounds for one step from its statistics, rollout summaries and gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.theory.bounds import (
    BiasBound,
    HorizonBound,
    SequenceChi2,
    bias_bound,
    horizon_bound,
    pinsker_bound,
    require,
    sequence_chi2,
)
from foreshock.theory.gradient import GradientNoise, GradientNorms, StepNoise, gradient_noise, step_noise

__all__ = ["Theory", "evaluate_theory"]


@dataclass(frozen=True, slots=True)
class Theory:
    """The bounds of one step; None if a needed value was not logged.

    `pinsker` bounds the token mean of D_TV and `tv_token` estimates it; `pinsker_notes` has a reason if the bound does
    not hold. `step_noise_with_bias` also counts the bias at its bound; None without B or if that bound overflows.
    """

    bias: BiasBound
    horizon: HorizonBound
    pinsker: float
    tv_token: float
    pinsker_notes: tuple[str, ...]
    sequence_chi2: SequenceChi2 | None
    gradient: GradientNoise | None
    step_noise: StepNoise | None
    step_noise_with_bias: StepNoise | None


def evaluate_theory(
    statistics: ComparisonStatistics,
    summaries: RolloutSummaries,
    *,
    delta_max: float | None = None,
    norms: GradientNorms | None = None,
    learning_rate: float | None = None,
    gradient_bound: float | None = None,
) -> Theory:
    """Return the bounds that the arguments allow.

    `delta_max` is exact, `norms` are before clipping, `learning_rate` is η, `gradient_bound` is B. Raises
    InvalidArgumentError for an argument out of range.
    """
    bias = bias_bound(summaries)
    tokens = statistics.tokens
    chi2, variation, above = (
        statistics.sum(name) / tokens if tokens else math.nan for name in ("chi2_token", "tv_token", "ratio_minus_one")
    )
    pinsker = pinsker_bound(chi2)
    lengths = summaries.column("n_tokens")
    longest = float(lengths.max()) if lengths.size else 0.0
    measured = int((lengths > 0).sum())
    noise = gradient_noise(norms) if norms is not None else None
    steps: tuple[StepNoise | None, StepNoise | None] = (None, None)
    if noise is not None and learning_rate is not None:
        steps = _step_noises(noise, learning_rate, gradient_bound, bias)
    return Theory(
        bias=bias,
        horizon=horizon_bound(longest, delta_max),
        pinsker=pinsker,
        tv_token=variation,
        # The two are equal if all |1 − ρ| are equal; then chance decides which one is larger.
        pinsker_notes=_uncovered(1.0 + above) if variation > 1.01 * pinsker else (),
        sequence_chi2=sequence_chi2(chi2, tokens / measured) if measured else None,
        gradient=noise,
        step_noise=steps[0],
        step_noise_with_bias=steps[1],
    )


def _step_noises(
    noise: GradientNoise, learning_rate: float, gradient_bound: float | None, bias: BiasBound
) -> tuple[StepNoise, StepNoise | None]:
    """Return the noise term of the variance alone, and with B also the one with the bias at its bound."""
    alone = step_noise(learning_rate, noise.of_batch)
    if gradient_bound is None:
        return alone, None
    require(gradient_bound >= 0.0, f"a norm must be at least 0, got {gradient_bound}", "gradient_bound")
    norm = gradient_bound * bias.per_unit
    return alone, step_noise(learning_rate, noise.of_batch, norm) if math.isfinite(norm) else None


def _uncovered(mean_ratio: float) -> tuple[str, ...]:
    """Return the reason why the estimate of D_TV exceeds ½√χ².

    The estimate is ½·E_μ[|1 − ρ| + 1 − ρ], which equals ½·E_μ|1 − ρ| only if E ρ = 1.
    """
    found = f"the estimate of the total variation exceeds the bound, since the mean ratio is {mean_ratio:.4g}"
    return (f"{found}: ½√χ² is a bound only if it is 1, that is if the logged μ sampled the tokens and covers π",)
