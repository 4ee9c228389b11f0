"""The measures of a comparison from its sums, each by the canonical aggregation: Σ over tokens / number of tokens.

NaN means not estimable: no tokens, an input that was not logged, or too few rollouts to resolve the quantity.
"""

import math

from foreshock.measures.estimators.bootstrap import effective_number
from foreshock.measures.estimators.intervals import interval_from_residuals
from foreshock.measures.estimators.pareto import pareto_shape
from foreshock.measures.registry import BOOTSTRAPPED, K3_BY_LAG, TOKENS_BY_LAG, WITH_INTERVAL
from foreshock.measures.statistics.comparison_sums import ComparisonSums
from foreshock.measures.statistics.conditions import BUCKET_EDGES, LAG_BUCKETS, LOW_PROBABILITY
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import SEQUENCE_SUMS
from foreshock.measures.statistics.tails import ABOVE, BELOW, TAIL_ASYMMETRY_LEVELS, TAIL_THRESHOLDS

__all__ = ["comparison_measures"]


def comparison_measures(statistics: ComparisonSums) -> dict[str, float]:
    """Return all comparison and sequence measures of the registry by column."""
    tokens = statistics.tokens
    k3 = statistics.sum("k3_kl")
    low_probability = slice(BUCKET_EDGES.index(LOW_PROBABILITY))
    low_tokens, low_abs_d = statistics.conditions["probability"].mean_of("abs_d", low_probability)
    entropy_tokens = statistics.count("entropy_tokens")
    entropy = _ratio(statistics.sum("entropy"), entropy_tokens)
    clusters = statistics.clusters
    surprisal_z = clusters.standardised("surprisal", statistics.sum("surprisal"))
    measures = {
        **_token_means(statistics),
        **_probabilities(statistics),
        **_distribution(statistics),
        **_tails(statistics),
        **_sequences(statistics),
        **_advantages(statistics),
        "low_probability_abs_d": low_abs_d,
        "low_probability_tokens": low_tokens,
        "pareto_k": pareto_shape(statistics.largest_d, tokens),
        "pareto_k_inverse": pareto_shape(statistics.largest_minus_d, tokens),
        "prompt_groups": clusters.count,
        "effective_groups": effective_number(k3, clusters.squared_residuals("k3_kl", 0.0)),
        "k3_kl_per_entropy": _ratio(k3, tokens) / entropy if entropy > 0.0 else math.nan,
        "surprisal_z": surprisal_z if entropy_tokens else math.nan,
        "tokens": tokens,
        "rollouts": statistics.rollouts,
        **{name: statistics.count(name) for name in ("incomplete_rollouts", "nonfinite_target", "nonfinite_behaviour")},
        # Bootstrap intervals need one row per rollout.
        **{f"{name}_bootstrap_{end}": math.nan for name in BOOTSTRAPPED for end in ("low", "high")},
    }
    for name in WITH_INTERVAL:
        column = "d" if name == "kl" else name
        mean = _ratio(statistics.sum(column), tokens)
        square = clusters.squared_residuals(column, mean)
        found = interval_from_residuals(-mean if name == "kl" else mean, square, tokens, clusters.count)
        # k1 of a sample may be negative, the other terms never are.
        found = found if name == "kl" else found.never_negative()
        measures[f"{name}_low"], measures[f"{name}_high"] = found.low, found.high
    for of_k3, of_tokens, lag in zip(K3_BY_LAG, TOKENS_BY_LAG, LAG_BUCKETS, strict=True):
        number, mean = statistics.conditions["lag"].mean_of("k3_kl", LAG_BUCKETS[lag])
        measures |= {of_k3.column: mean, of_tokens.column: number}
    return measures


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _token_means(statistics: ComparisonSums) -> dict[str, float]:
    names = (
        "d", "d2", "k3_kl", "ratio_minus_one", "chi2_token", "reverse_chi2_token", "tv_token", "prob_error_minus_one",
    )  # fmt: skip
    d, d2, k3, ratio, chi2, reverse, tv, error = (_ratio(statistics.sum(name), statistics.tokens) for name in names)
    return {
        "kl": -d,
        "k2_kl": 0.5 * d2,
        "k3_kl": k3,
        "chi2_token": chi2,
        "reverse_chi2_token": reverse,
        "tv_token": tv,
        # ρ² − 1 = (ρ − 1)² + 2(ρ − 1)
        "verl_chi2_token": chi2 + 2.0 * ratio,
        "mean_ratio": 1.0 + ratio,
        "token_mult_prob_error": 1.0 + error,
        "mean_abs_d": _ratio(statistics.sum("abs_d"), statistics.tokens),
        "rms_d": math.sqrt(d2),
        "zero_fraction": _ratio(statistics.count("zero_tokens"), statistics.tokens),
        "ess_token": statistics.token_weights.effective_fraction(),
        "pinsker_tv_bound": 0.5 * math.sqrt(chi2),
    }


def _probabilities(statistics: ComparisonSums) -> dict[str, float]:
    """Return verl's measures of probabilities."""
    tokens = statistics.tokens
    (of_target, of_both), (_, of_behaviour) = statistics.probabilities.products.tolist()
    of_difference = float(statistics.difference.products[0, 0])
    scale = math.sqrt(of_target) * math.sqrt(of_behaviour)
    return {
        "rollout_probs_diff_mean": _ratio(statistics.sum("abs_probability_difference"), tokens),
        "rollout_probs_diff_max": statistics.extreme("max_probability_difference"),
        "rollout_probs_diff_std": math.sqrt(of_difference / (tokens - 1)) if tokens > 1 else math.nan,
        "rollout_actor_probs_pearson_corr": max(-1.0, min(1.0, of_both / scale)) if scale > 0.0 else math.nan,
    }


def _distribution(statistics: ComparisonSums) -> dict[str, float]:
    """Return extremes and quantiles of d."""
    tokens = statistics.tokens
    counts = statistics.histogram.sum(axis=0)
    counts[0] += statistics.count("zero_tokens")
    minus_lowest, highest = statistics.extreme("minus_min_d"), statistics.extreme("max_d")
    largest = max(abs(minus_lowest), abs(highest)) if tokens else math.nan
    names, fractions = ("p50", "p90", "p99", "p999"), (0.5, 0.9, 0.99, 0.999)
    found = LOG_RATIO_GRID.quantiles(counts, fractions) if tokens else [math.nan] * len(names)
    return {
        # The middle of the last bin can exceed the largest value in it.
        **{f"{name}_abs_d": min(value, largest) for name, value in zip(names, found, strict=True)},
        "max_abs_d": largest,
        "min_d": -minus_lowest,
        "max_d": highest,
    }


def _tails(statistics: ComparisonSums) -> dict[str, float]:
    """Return the tail measures of d: both tails together, and each by itself."""
    tokens = statistics.tokens
    measures = {}
    for threshold in TAIL_THRESHOLDS:
        both = [statistics.tail_count(side, math.log(threshold)) for side in (BELOW, ABOVE)]
        measures[f"tail_{threshold}"] = _ratio(sum(both), tokens)
    for name, level in TAIL_ASYMMETRY_LEVELS.items():
        below, above = statistics.tail_count(BELOW, level), statistics.tail_count(ABOVE, level)
        # Σ ρ = Σ (ρ − 1) + number of tokens.
        under_target = statistics.tail_sum(ABOVE, level, "ratio_minus_one") + above
        measures[f"tail_below_{name}"] = _ratio(below, tokens)
        measures[f"tail_above_{name}"] = _ratio(above, tokens)
        measures[f"tail_asymmetry_{name}"] = _ratio(below - under_target, tokens)
    return measures


def _sequences(statistics: ComparisonSums) -> dict[str, float]:
    """Return means over whole sequences, and effective sample sizes of their turns and of themselves."""
    rollouts = statistics.count("whole_rollouts")
    mean_d, k3_mean, k3, abs_mean_d, abs_sum_d, geo, ratio, target, log_target, behaviour, log_behaviour, chi2 = (
        _ratio(statistics.sum(name), rollouts) for name in SEQUENCE_SUMS
    )
    return {
        "k3_kl_seq_mean": k3_mean,
        "log_ppl_diff": -mean_d,
        "log_ppl_abs_diff": abs_mean_d,
        "sequence_log_ppl_abs_diff": abs_sum_d,
        "geo_ratio": 1.0 + geo,
        "verl_chi2_seq": chi2,
        "ess_turn": _estimable(statistics.turn_weights, statistics.sum("sum_k3")),
        "ess_seq": _estimable(statistics.sequence_weights, statistics.sum("sum_k3")),
        # Σ k3 of a sequence estimates KL·T, the KL of a whole sequence.
        "ess_seq_predicted": math.exp(-2.0 * k3),
        # verl's perplexities, unclamped.
        "training_ppl": target,
        "training_log_ppl": log_target,
        "rollout_ppl": behaviour,
        "rollout_log_ppl": log_behaviour,
        "log_ppl_diff_max": statistics.extreme("max_log_ppl_diff") if rollouts else math.nan,
        "log_ppl_diff_min": -statistics.extreme("minus_min_log_ppl_diff") if rollouts else math.nan,
        "ppl_ratio": 1.0 + ratio,
    }


def _advantages(statistics: ComparisonSums) -> dict[str, float]:
    """Return the measures of d with the advantage A, over the tokens with an advantage."""
    tokens = statistics.count("advantage_tokens")
    positive, negative = (
        _ratio(statistics.sum(name), tokens) for name in ("positive_advantage_skew", "negative_advantage_skew")
    )
    both, advantage, d = (
        _ratio(statistics.sum(name), tokens) for name in ("advantage_d", "advantage", "d_with_advantage")
    )
    return {
        "advantage_d_cov": both - advantage * d,
        "advantage_skew_positive": positive,
        "advantage_skew_negative": negative,
        "advantage_skew": positive + negative,
        "bad_update_fraction": _ratio(statistics.count("bad_updates"), tokens),
    }


def _estimable(weights: LogWeights, k3_sum: float) -> float:
    """Return the effective fraction, or NaN if 2·KL·T > ln N, because a sample of N cannot show less than 1/N.

    KL·T is the KL of a whole turn or sequence: Σ k3 / their number.
    """
    if weights.count == 0 or not 2.0 * k3_sum / weights.count <= math.log(weights.count):
        return math.nan
    return weights.effective_fraction()
