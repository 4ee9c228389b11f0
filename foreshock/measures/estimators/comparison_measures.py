"""The measures of a comparison from its sums, each by the canonical aggregation: Σ over tokens / number of tokens.

NaN means not estimable: no tokens, an input that was not logged, or too few rollouts to resolve the quantity.
"""

import math

from foreshock.measures.estimators.bootstrap import effective_number
from foreshock.measures.estimators.intervals import token_mean_interval
from foreshock.measures.estimators.pareto import pareto_shape
from foreshock.measures.registry import BOOTSTRAPPED, K3_BY_LAG, TOKENS_BY_LAG, WITH_INTERVAL
from foreshock.measures.statistics.comparison_sums import ComparisonSums
from foreshock.measures.statistics.compensated_sums import LogWeights
from foreshock.measures.statistics.conditions import BUCKET_EDGES, LAG_BUCKETS, LOW_PROBABILITY
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.rollout_sums import SEQUENCE_MEANS
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
        "incomplete_rollouts": statistics.count("incomplete_rollouts"),
        "nonfinite_target": statistics.nonfinite_target,
        "nonfinite_behaviour": statistics.nonfinite_behaviour,
        # Bootstrap intervals need one row per rollout.
        **{f"{name}_bootstrap_{end}": math.nan for name in BOOTSTRAPPED for end in ("low", "high")},
    }
    for name in WITH_INTERVAL:
        interval = token_mean_interval(statistics, name)
        measures[f"{name}_low"], measures[f"{name}_high"] = interval.low, interval.high
    for of_k3, of_tokens, lag in zip(K3_BY_LAG, TOKENS_BY_LAG, LAG_BUCKETS, strict=True):
        number, mean = statistics.conditions["lag"].mean_of("k3_kl", LAG_BUCKETS[lag])
        measures |= {of_k3.column: mean, of_tokens.column: number}
    return measures


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _named_means(means: list[float], suffix: str) -> dict[str, float]:
    """Return the measures that are means of one term, from the means of SEQUENCE_MEANS."""
    d, d2, k3, ratio, chi2, reverse, tv, error = means
    return {
        f"kl{suffix}": -d,
        f"k2_kl{suffix}": 0.5 * d2,
        f"k3_kl{suffix}": k3,
        f"chi2_token{suffix}": chi2,
        f"reverse_chi2_token{suffix}": reverse,
        f"tv_token{suffix}": tv,
        # ρ² − 1 = (ρ − 1)² + 2(ρ − 1)
        f"verl_chi2_token{suffix}": chi2 + 2.0 * ratio,
        f"mean_ratio{suffix}": 1.0 + ratio,
        f"token_mult_prob_error{suffix}": 1.0 + error,
    }


def _token_means(statistics: ComparisonSums) -> dict[str, float]:
    means = [_ratio(statistics.sum(name), statistics.tokens) for name in SEQUENCE_MEANS]
    return {
        **_named_means(means, ""),
        "mean_abs_d": _ratio(statistics.sum("abs_d"), statistics.tokens),
        "rms_d": math.sqrt(means[1]) if means[1] >= 0.0 else math.nan,
        "zero_fraction": _ratio(statistics.count("zero_tokens"), statistics.tokens),
        "ess_token": statistics.token_weights.effective_fraction(),
        "pinsker_tv_bound": 0.5 * math.sqrt(means[4]) if means[4] >= 0.0 else math.nan,
    }


def _probabilities(statistics: ComparisonSums) -> dict[str, float]:
    """Return verl's measures of probabilities."""
    tokens = statistics.tokens
    of_target = _moment(statistics, "within_target", "between_target", "target_probability")
    of_behaviour = _moment(statistics, "within_behaviour", "between_behaviour", "behaviour_probability")
    of_both = _moment(statistics, "within_product", "between_product", "target_probability", "behaviour_probability")
    of_difference = _moment(statistics, "within_difference", "between_difference", "abs_probability_difference")
    scale = math.sqrt(of_target) * math.sqrt(of_behaviour) if min(of_target, of_behaviour) > 0.0 else 0.0
    return {
        "rollout_probs_diff_mean": _ratio(statistics.sum("abs_probability_difference"), tokens),
        "rollout_probs_diff_max": statistics.extreme("max_probability_difference"),
        "rollout_probs_diff_std": math.sqrt(max(of_difference, 0.0) / (tokens - 1)) if tokens > 1 else math.nan,
        "rollout_actor_probs_pearson_corr": max(-1.0, min(1.0, of_both / scale)) if scale > 0.0 else math.nan,
    }


def _moment(statistics: ComparisonSums, within: str, between: str, first: str, second: str | None = None) -> float:
    """Return Σ (a − mean a)(b − mean b) over tokens, from moments within and between rollouts.

    Exact rational arithmetic, because Σ S²/n and (ΣS)²/n may agree in all but their last digits.
    """
    sums = [statistics.sum(name) for name in (within, between, first, second or first)]
    if not statistics.tokens or not all(map(math.isfinite, sums)):
        return math.nan
    # Integers: their quotient is rounded once, as with Fractions, but no term is reduced.
    total, of_total = statistics.exact_ratio(between)
    one, of_one = statistics.exact_ratio(first)
    other, of_other = statistics.exact_ratio(second or first)
    difference = total * of_one * of_other * statistics.tokens - one * other * of_total
    return statistics.sum(within) + difference / (of_total * of_one * of_other * statistics.tokens)


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
    """Return means over sequences, and effective sample sizes of turns and sequences."""
    # Those of which each token was measured; the others have no ratio of their sequence.
    rollouts = statistics.count("measured_rollouts")
    with_tokens = rollouts + statistics.count("incomplete_rollouts")
    means = [_ratio(statistics.sum(f"{name}_seq"), rollouts) for name in SEQUENCE_MEANS]
    named = _named_means(means, "_seq_mean")
    return {
        **named,
        "log_ppl_diff": named["kl_seq_mean"],
        "log_ppl_abs_diff": _ratio(statistics.sum("abs_mean_d"), rollouts),
        "sequence_log_ppl_abs_diff": _ratio(statistics.sum("abs_sum_d"), rollouts),
        "geo_ratio": 1.0 + _ratio(statistics.sum("geo_ratio_minus_one"), rollouts),
        "verl_chi2_seq": _ratio(statistics.sum("squared_weight_minus_one"), rollouts),
        "ess_turn": _estimable(statistics.turn_weights, statistics.sum("k3_kl")),
        "ess_seq": _estimable(statistics.sequence_weights, statistics.sum("k3_kl")),
        # KL·T is the KL of a whole sequence: Σ k3 / number of sequences.
        "ess_seq_predicted": math.exp(-2.0 * _ratio(statistics.sum("k3_kl"), with_tokens)),
        # verl's perplexities, unclamped.
        "training_ppl": _ratio(statistics.sum("target_ppl"), rollouts),
        "training_log_ppl": _ratio(statistics.sum("target_log_ppl"), rollouts),
        "rollout_ppl": _ratio(statistics.sum("behaviour_ppl"), rollouts),
        "rollout_log_ppl": _ratio(statistics.sum("behaviour_log_ppl"), rollouts),
        "log_ppl_diff_max": statistics.extreme("max_log_ppl_diff") if rollouts else math.nan,
        "log_ppl_diff_min": -statistics.extreme("minus_min_log_ppl_diff") if rollouts else math.nan,
        "ppl_ratio": 1.0 + _ratio(statistics.sum("ppl_ratio_minus_one"), rollouts),
    }


def _advantages(statistics: ComparisonSums) -> dict[str, float]:
    """Return the measures of d with the advantage A, over the tokens with an advantage."""
    tokens = statistics.count("advantage_tokens")
    positive, negative = (
        _ratio(statistics.sum(name), tokens) for name in ("positive_advantage_skew", "negative_advantage_skew")
    )
    names = ("advantage_d", "advantage", "d_with_advantage")
    covariance = math.nan
    if tokens and all(math.isfinite(statistics.sum(name)) for name in names):
        # Σ A·d / n − (Σ A)(Σ d) / n², in exact rational arithmetic.
        of_both, of_advantage, of_d = map(statistics.exact_sum, names)
        covariance = float((of_both - of_advantage * of_d / tokens) / tokens)
    return {
        "advantage_d_cov": covariance,
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
