"""Bounds of the literature evaluated on a batch, with a note on each bound that is vacuous there.

The bias of the gradient that comes from sampling with μ and training π is E_μ[R·∇log π(y)] − E_π[R·∇log π(y)]. B bounds
the norm of ∇log π of a token, T is the length of a sequence, Δ the total variation between π and μ at a state. Bounds
are given per unit of B.

A step's gain is at least η(1 − Lη/2)‖∇J‖² + η(1 − Lη)⟨∇J, Bias⟩ − (Lη²/2)·[Var + ‖Bias‖²] (SGA lemma, Li et al., *When
Speed Kills Stability*, part 1). Norms give Var and not ⟨∇J, Bias⟩; halving η quarters the cost of Var.
"""

import math
from dataclasses import dataclass

import numpy as np

from foreshock.api import steps
from foreshock.corrections.sequences import incomplete_notes, mean, undersampling_notes
from foreshock.errors import InvalidArgumentError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.estimators.bootstrap import nonnegative_intervals
from foreshock.measures.rollout_summaries import RolloutSummaries


def bias_bound(summaries: RolloutSummaries) -> steps.BiasRecord:
    """Return B·E_μ[|ρ_seq − 1|·T·|R|] per unit of B, over the whole rollouts with a reward; a note counts the others.

    Source: ‖E_μ[f] − E_π[f]‖ ≤ E_μ[|1 − ρ_seq|·‖f‖] with ‖f‖ ≤ B·T·|R|.
    """
    tokens, reward, whole = (
        summaries.column("n_tokens"),
        summaries.column("reward").astype(np.float64),
        summaries.whole(),
    )
    incomplete = incomplete_notes(int((tokens < summaries.column("length")).sum()))
    chosen = whole & np.isfinite(reward)
    if not chosen.any():
        nothing = dict.fromkeys(("per_unit", "low", "high", "trivial", "mean_length", "largest_reward"), math.nan)
        return steps.BiasRecord(
            **nothing, sequences=0, longest=0, notes=("no measured rollout has a reward", *incomplete)
        )
    lengths, rewards = tokens[chosen].astype(np.float64), np.abs(reward[chosen])
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.where(rewards > 0.0, np.abs(np.expm1(summaries.column("sum_d")[chosen])) * lengths * rewards, 0.0)
        ones = np.ones(terms.size, np.int64)
        (interval,) = nonnegative_intervals(terms[:, None], ones, summaries.clusters()[chosen])
    average, largest = mean(lengths), float(rewards.max())
    per_unit, trivial = mean(terms), 2.0 * average * largest
    vacuous = ("no better than the trivial bound",) if per_unit >= trivial > 0.0 else ()
    return steps.BiasRecord(
        per_unit=per_unit,
        low=interval.low,
        high=interval.high,
        trivial=trivial,
        sequences=int(chosen.sum()),
        mean_length=average,
        longest=int(tokens[chosen].max()),
        largest_reward=largest,
        notes=(*vacuous, *incomplete, *undersampling_notes(summaries.column("sum_k3")[chosen])),
    )


def horizon_bound(length: float, delta_max: float | None = None) -> steps.HorizonRecord:
    """Return 2·Δmax·T² of Li et al., *When Speed Kills Stability*, part 2; `length` T is that of the longest sequence.

    `delta_max` is the largest exact total variation over the visited states, computed from whole distributions;
    log-probs of sampled tokens do not give it. It is at most the supremum over all states. Raises InvalidArgumentError
    for a Δ outside [0, 1] or a negative length.
    """
    require(length >= 0.0, f"must be a number of tokens of at least 0, got {length}", "length")
    trivial = 2.0 * length
    if delta_max is None:
        reason = "Δmax is a supremum over states: it needs whole distributions, not log-probs of sampled tokens"
        return steps.HorizonRecord(
            value=math.nan, trivial=trivial, vacuous=False, delta_max=math.nan, not_estimable=reason
        )
    require(0.0 <= delta_max <= 1.0, f"a total variation must lie between 0 and 1, got {delta_max}", "delta_max")
    value, vacuous = 2.0 * delta_max * length * length, delta_max * length >= 1.0
    return steps.HorizonRecord(value=value, trivial=trivial, vacuous=vacuous, delta_max=delta_max)


def pinsker_bound(chi2: float) -> float:
    """Return ½√χ², an upper bound of D_TV(π, μ); by Jensen also of the token means.

    χ² may be of either direction. The estimate E_μ (ρ − 1)² from tokens of μ is χ²(π‖μ), and gives a bound, only if μ
    covers π: under truncation E ρ < 1, and D_TV = E_μ (1 − ρ)⁺ is at most ½(√E_μ (ρ − 1)² + 1 − E_μ ρ).

    Raises InvalidArgumentError for a χ² below 0; NaN gives NaN.
    """
    require(not chi2 < 0.0, f"χ² must be at least 0, got {chi2}", "chi2")
    return 0.5 * math.sqrt(chi2)


def sequence_chi2(chi2_token: float, length: float) -> steps.SequenceChi2Record:
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
    return steps.SequenceChi2Record(value=value, log10=logarithm / math.log(10.0), chi2_token=chi2_token, length=length)


def require(holds: bool, message: str, argument: str) -> None:
    """Raise InvalidArgumentError with `message` unless the condition holds."""
    if not holds:
        raise InvalidArgumentError(message, argument)


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Norms of mean gradients before clipping, over parts of a batch that are split by prompt.

    `micro_batch` is the root of the mean square of ‖g_b‖ over micro-batches of `micro_batch_prompts` prompts each;
    `batch` is ‖g_B‖ of the mean over all `batch_prompts` prompts.
    """

    micro_batch: float
    batch: float
    micro_batch_prompts: float
    batch_prompts: float


def gradient_noise(norms: GradientNorms) -> steps.GradientRecord:
    """Return V̂ = (‖g_b‖² − ‖g_B‖²) / (1/b − 1/B) and the quantities that follow from it.

    V̂ is the trace of the covariance of one prompt's gradient; the noise scale is NaN if the signal is not positive.
    Raises InvalidArgumentError for norms that are negative or whose squares are not finite, and unless 1 ≤ b < B.
    Source: McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, appendix A.
    """
    for name in ("micro_batch", "batch"):
        norm = getattr(norms, name)
        require(math.isfinite(norm) and norm >= 0.0, f"a norm must be a finite number of at least 0, got {norm}", name)
        require(
            math.isfinite(norm * norm), f"the square of a norm must be a finite float64, got a norm of {norm}", name
        )
    small, large = norms.micro_batch_prompts, norms.batch_prompts
    require(math.isfinite(small) and small >= 1.0, f"must be at least 1, got {small}", "micro_batch_prompts")
    require(
        math.isfinite(large) and large > small,
        f"must be more than the {small} prompts of a micro-batch, got {large}",
        "batch_prompts",
    )
    of_small, of_large = norms.micro_batch**2, norms.batch**2
    variance = (of_small - of_large) / (1.0 / small - 1.0 / large)
    signal = (large * of_large - small * of_small) / (large - small)
    notes = (
        ("V̂ is negative: by chance, or because the micro-batches are not split by prompt",) if variance < 0.0 else ()
    )
    parity = variance / signal if signal > 0.0 else math.nan
    return steps.GradientRecord(
        variance=variance, of_batch=variance / large, signal=signal, batch_prompts_for_parity=parity, notes=notes
    )


def step_noise(learning_rate: float, variance: float, bias_norm: float = 0.0) -> steps.StepNoiseRecord:
    """Return the noise term at η and at η/2; `variance` is that of the gradient of the step, V̂ / B.

    Raises InvalidArgumentError for a learning rate or a bias that is negative or not finite.
    """
    for value, argument in ((learning_rate, "learning_rate"), (bias_norm, "bias_norm")):
        require(math.isfinite(value) and value >= 0.0, f"must be finite and at least 0, got {value}", argument)
    square, half = variance + bias_norm * bias_norm, 0.5 * learning_rate
    at_rate, at_half = 0.5 * learning_rate * learning_rate * square, 0.5 * half * half * square
    return steps.StepNoiseRecord(at_learning_rate=at_rate, at_half=at_half, bias_norm=bias_norm)


def evaluate_theory(
    statistics: ComparisonStatistics,
    summaries: RolloutSummaries,
    *,
    delta_max: float | None = None,
    norms: GradientNorms | None = None,
    learning_rate: float | None = None,
    gradient_bound: float | None = None,
) -> steps.Theory:
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
    # The estimate is ½·E_μ[|1 − ρ| + 1 − ρ], which equals ½·E_μ|1 − ρ| only if E ρ = 1.
    uncovered = (
        f"the estimate of the total variation exceeds the bound, since the mean ratio is {1.0 + above:.4g}: ½√χ² is a "
        "bound only if it is 1, that is if the logged μ sampled the tokens and covers π"
    )
    lengths = summaries.column("n_tokens")
    longest = float(lengths.max()) if lengths.size else 0.0
    measured = int((lengths > 0).sum())
    noise = gradient_noise(norms) if norms is not None else None
    noises: tuple[steps.StepNoiseRecord | None, steps.StepNoiseRecord | None] = (None, None)
    if noise is not None and learning_rate is not None:
        noises = _step_noises(noise, learning_rate, gradient_bound, bias)
    return steps.Theory(
        bias=bias,
        horizon=horizon_bound(longest, delta_max),
        # The two are equal if all |1 − ρ| are equal; then chance decides which one is larger.
        pinsker=steps.PinskerRecord(
            bound=pinsker, tv_token=variation, notes=(uncovered,) if variation > 1.01 * pinsker else ()
        ),
        sequence_chi2=sequence_chi2(chi2, tokens / measured) if measured else None,
        gradient=noise,
        step_noise=noises[0],
        step_noise_with_bias=noises[1],
    )


def _step_noises(
    noise: steps.GradientRecord, learning_rate: float, gradient_bound: float | None, bias: steps.BiasRecord
) -> tuple[steps.StepNoiseRecord, steps.StepNoiseRecord | None]:
    """Return the noise term of the variance alone, and with B also the one with the bias at its bound."""
    alone = step_noise(learning_rate, noise.of_batch)
    if gradient_bound is None:
        return alone, None
    require(gradient_bound >= 0.0, f"a norm must be at least 0, got {gradient_bound}", "gradient_bound")
    norm = gradient_bound * bias.per_unit
    return alone, step_noise(learning_rate, noise.of_batch, norm) if math.isfinite(norm) else None
