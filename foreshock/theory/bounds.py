"""Bounds on the bias of the gradient that comes from sampling with μ and training π.

The bias is E_μ[R·∇log π(y)] − E_π[R·∇log π(y)]. B bounds the norm of ∇log π of a token, T is the length of a sequence,
Δ the total variation between π and μ at a state. Bounds are given per unit of B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreshock.corrections.sequences import undersampling_notes
from foreshock.corrections.sums import mean
from foreshock.errors import InvalidArgumentError
from foreshock.measures.estimators.bootstrap import nonnegative_intervals
from foreshock.measures.rollout_summaries import RolloutSummaries

__all__ = [
    "BiasBound",
    "HorizonBound",
    "SequenceChi2",
    "bias_bound",
    "horizon_bound",
    "pinsker_bound",
    "require",
    "sequence_chi2",
]


@dataclass(frozen=True, slots=True)
class BiasBound:
    """The bound ‖bias of the gradient‖ ≤ B·E_μ[|ρ_seq − 1|·T·|R|], estimated from the batch for B = 1.

    `per_unit` is the estimate; `low` and `high` end its bootstrap-t interval by prompt group, a resampling range: its
    coverage was not measured. `trivial` is 2·T·max|R| with the mean length T: no two policies with this mean length
    exceed it. `sequences` counts those with a reward; the fields are NaN if there are none.
    """

    per_unit: float
    low: float
    high: float
    trivial: float
    sequences: int
    mean_length: float
    longest: int
    largest_reward: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HorizonBound:
    """The bound 2·Δmax·T² of the bias per unit of B and |R|; NaN and `not_estimable` without an exact Δmax.

    `vacuous` is True if Δmax·T ≥ 1: then the trivial bound 2·T is at least as small.
    """

    value: float
    trivial: float
    vacuous: bool
    not_estimable: str | None = None


@dataclass(frozen=True, slots=True)
class SequenceChi2:
    """(1 + χ²)^T: E ρ_seq² extrapolated to independent tokens that all have the mean χ². It is not a bound.

    `value` is infinite on overflow; `log10` is its logarithm.
    """

    value: float
    log10: float
    chi2_token: float
    length: float


def bias_bound(summaries: RolloutSummaries) -> BiasBound:
    """Return B·E_μ[|ρ_seq − 1|·T·|R|] per unit of B, over the rollouts with a measured token and a reward.

    T counts the measured tokens. Source: ‖E_μ[f] − E_π[f]‖ ≤ E_μ[|1 − ρ_seq|·‖f‖] with ‖f‖ ≤ B·T·|R|.
    """
    tokens, reward = summaries.column("n_tokens"), summaries.column("reward").astype(np.float64)
    chosen = (tokens > 0) & np.isfinite(reward)
    if not chosen.any():
        nothing = math.nan
        notes = ("no measured rollout has a reward",)
        return BiasBound(nothing, nothing, nothing, nothing, 0, nothing, 0, nothing, notes)
    lengths, rewards = tokens[chosen].astype(np.float64), np.abs(reward[chosen])
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.where(rewards > 0.0, np.abs(np.expm1(summaries.column("sum_d")[chosen])) * lengths * rewards, 0.0)
        ones = np.ones(terms.size, np.int64)
        (interval,) = nonnegative_intervals(terms[:, None], ones, summaries.clusters()[chosen])
    average, largest = mean(lengths), float(rewards.max())
    per_unit, trivial = mean(terms), 2.0 * average * largest
    vacuous = ("no better than the trivial bound",) if per_unit >= trivial > 0.0 else ()
    return BiasBound(
        per_unit,
        interval.low,
        interval.high,
        trivial,
        int(chosen.sum()),
        average,
        int(tokens[chosen].max()),
        largest,
        vacuous + undersampling_notes(summaries.column("sum_k3")[chosen]),
    )


def horizon_bound(length: float, delta_max: float | None = None) -> HorizonBound:
    """Return 2·Δmax·T² of Li et al., *When Speed Kills Stability*, part 2; `length` T is that of the longest sequence.

    `delta_max` is the largest exact total variation over the visited states, computed from whole distributions;
    log-probs of sampled tokens do not give it. It is at most the supremum over all states. Raises InvalidArgumentError
    for a Δ outside [0, 1] or a negative length.
    """
    require(length >= 0.0, f"must be a number of tokens of at least 0, got {length}", "length")
    trivial = 2.0 * length
    if delta_max is None:
        return HorizonBound(
            math.nan,
            trivial,
            False,
            "Δmax is a supremum over states: it needs whole distributions, not log-probs of sampled tokens",
        )
    require(0.0 <= delta_max <= 1.0, f"a total variation must lie between 0 and 1, got {delta_max}", "delta_max")
    return HorizonBound(2.0 * delta_max * length * length, trivial, delta_max * length >= 1.0)


def pinsker_bound(chi2: float) -> float:
    """Return ½√χ², an upper bound of D_TV(π, μ); by Jensen also of the token means.

    χ² may be of either direction. The estimate E_μ (ρ − 1)² from tokens of μ is χ²(π‖μ), and gives a bound, only if μ
    covers π: under truncation E ρ < 1, and D_TV = E_μ (1 − ρ)⁺ is at most ½(√E_μ (ρ − 1)² + 1 − E_μ ρ).

    Raises InvalidArgumentError for a χ² below 0; NaN gives NaN.
    """
    require(not chi2 < 0.0, f"χ² must be at least 0, got {chi2}", "chi2")
    return 0.5 * math.sqrt(chi2)


def sequence_chi2(chi2_token: float, length: float) -> SequenceChi2:
    """Return (1 + χ²)^T from the token mean of χ²(π‖μ) and a length in tokens.

    Part 2 of *When Speed Kills Stability* bounds the variance of sequence weights by it, with a χ² that holds at every
    state. With the mean χ² of a sample it is an extrapolation to independent tokens. Raises InvalidArgumentError for a
    negative argument.
    """
    require(not chi2_token < 0.0, f"χ² must be at least 0, got {chi2_token}", "chi2_token")
    require(length >= 0.0, f"must be a number of tokens of at least 0, got {length}", "length")
    logarithm = length * math.log1p(chi2_token)
    try:
        value = math.exp(logarithm)
    except OverflowError:
        value = math.inf
    return SequenceChi2(value, logarithm / math.log(10.0), chi2_token, length)


def require(holds: bool, message: str, argument: str) -> None:
    """Raise InvalidArgumentError with `message` unless the condition holds."""
    if not holds:
        raise InvalidArgumentError(message, argument)
