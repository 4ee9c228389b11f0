"""All measures: one record each, with its meaning and its source.

`MEASURES`, in reading order, generates the service's wide table, the exporter and the pages. `name` is the field's
name; `column` is the same as an identifier (`tail(2)` → `tail_2`), the key in the dictionaries that
`ComparisonStatistics.measures()` and `StepStatistics.measures()` return.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from foreshock.interval_names import RANGE
from foreshock.measures.statistics.conditions import LAG_BUCKETS, LOW_PROBABILITY
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP
from foreshock.measures.statistics.tails import (
    LARGEST_TAIL_SHAPE,
    LARGEST_VALUES,
    TAIL_ASYMMETRY_LEVELS,
    TAIL_THRESHOLDS,
)

Kind = Literal["comparison", "step", "sequence"]

TOKEN_MEAN = "token mean"
SEQUENCE_MEAN = "mean over sequences"


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure.

    "comparison" measures are over tokens and "sequence" measures over whole responses, both of a comparison
    `target/behaviour` (π/μ); "step" measures are over the rollouts of a step. `direction` names the divergence that a
    value estimates for tokens drawn from μ, or the good values. `aggregation` names the set that the mean is over.
    `page_group` is the title of the group of a step's page that shows it, if the page does not list it itself; `metric`
    is its name in Prometheus, if the exporter does not name it itself.
    """

    name: str
    formula: str
    unit: str
    direction: str
    aggregation: str
    kind: Kind
    source: str
    column_type: Literal["float", "integer"] = "float"
    page_group: str = ""
    metric: str = ""

    @property
    def column(self) -> str:
        """The name as a column: letters, digits and underscores."""
        return re.sub(r"\W+", "_", self.name).strip("_")


def _token(name: str, formula: str, unit: str, direction: str, source: str) -> Measure:
    return Measure(name, formula, unit, direction, TOKEN_MEAN, "comparison", source)


def _sequence(name: str, formula: str, unit: str, direction: str, source: str) -> Measure:
    return Measure(name, formula, unit, direction, SEQUENCE_MEAN, "sequence", source)


def _extreme(name: str, formula: str, unit: str, direction: str, aggregation: str) -> Measure:
    return Measure(name, formula, unit, direction, aggregation, "comparison", "Foreshock")


def _count(name: str, formula: str, kind: Kind = "comparison") -> Measure:
    return Measure(name, formula, "count", "", "sum", kind, "Foreshock", "integer")


_LARGEST = f"from the {LARGEST_VALUES} largest"


def _level(name: str) -> str:
    """Return a name of TAIL_ASYMMETRY_LEVELS as it is written in a formula."""
    return name.replace("ln", "ln ")


# Measures with an interval clustered by prompt group: their unit, and the divergence that they estimate. A step's page
# shows the interval beside the value.
WITH_INTERVAL = {
    "kl": ("nats", "KL(μ‖π) if μ sampled"),
    "k3_kl": ("nats", "KL(μ‖π) if μ sampled"),
    "chi2_token": ("1", "χ²(π‖μ)"),
    "reverse_chi2_token": ("1", "χ²(μ‖π)"),
    "tv_token": ("1", "D_TV(π, μ)"),
}
# Measures that also have a bootstrap interval.
BOOTSTRAPPED = ("k3_kl", "chi2_token", "tv_token")

SCHULMAN = 'Schulman, "Approximating KL divergence" (2020)'
VERL = "verl, rollout_corr_helper"
VERL_UNCLAMPED = VERL + "; without its clamp at exp(±20)"
PSIS = "Zhang and Stephens (2009); Pareto smoothed importance sampling (2024)"
VERL_DEBUG = "verl, debug metrics"

_PER_TOKEN: tuple[Measure, ...] = (
    _token("kl", "−d", "nats", "KL(μ‖π) if μ sampled, k1", SCHULMAN),
    _token("k2_kl", "d²/2", "nats", "KL(μ‖π) if μ sampled, for small d", SCHULMAN),
    _token("k3_kl", "ρ − 1 − d", "nats", "KL(μ‖π) if μ sampled, never negative", SCHULMAN),
    _token("chi2_token", "(ρ − 1)²", "1", "χ²(π‖μ)", "definition of χ²"),
    _token("reverse_chi2_token", "(1 − ρ)²/ρ", "1", "χ²(μ‖π)", "definition of χ²"),
    _token("tv_token", "(1 − ρ)⁺", "1", "D_TV(π, μ), also under truncation", "definition of total variation"),
    _token("verl_chi2_token", "ρ² − 1", "1", "χ²(π‖μ) if E ρ = 1", VERL_UNCLAMPED),
    _token(
        "mean_ratio", "ρ", "1", "1 if the logged μ is the sampling distribution and covers π", "importance sampling"
    ),
    _token("token_mult_prob_error", "exp|d|", "1", "1 is ideal, above 1.05 suspicious", "NeMo-RL"),
)

_TOKEN_ONLY: tuple[Measure, ...] = (
    _token("mean_abs_d", "|d|", "nats", "0 is agreement", "Foreshock"),
    _token("rms_d", "√ mean d²", "nats", "0 is agreement", "Foreshock"),
    _extreme("p50_abs_d", "|d|, median, on a grid of about 1 %", "nats", "0 is agreement", "quantile of tokens"),
    _extreme("p90_abs_d", "|d|, 90th percentile, same grid", "nats", "0 is agreement", "quantile of tokens"),
    _extreme("p99_abs_d", "|d|, 99th percentile, same grid", "nats", "0 is agreement", "quantile of tokens"),
    _extreme("p999_abs_d", "|d|, 99.9th percentile, same grid", "nats", "0 is agreement", "quantile of tokens"),
    _extreme("max_abs_d", "|d|", "nats", "0 is agreement", "maximum over tokens"),
    _extreme("min_d", "d", "nats", "far below 0: π ≪ μ", "minimum over tokens"),
    _extreme("max_d", "d", "nats", "far above 0: π ≫ μ", "maximum over tokens"),
    Measure(
        "low_probability_abs_d", f"|d|, μ < {LOW_PROBABILITY:g}", "nats",
        "0 is agreement; a mismatch shows first in tokens that the sampler gave a low probability",
        f"mean over the tokens with μ < {LOW_PROBABILITY:g}", "comparison", "Foreshock",
    ),
    _token("zero_fraction", "1{d = 0}", "1", "1 if π was copied from μ", "Foreshock"),
    _token("rollout_probs_diff_mean", "|π − μ|", "1", "0 is agreement; hides rare tokens", VERL_DEBUG),
    Measure(
        "rollout_probs_diff_max", "|π − μ|", "1", "0 is agreement", "maximum over tokens", "comparison", VERL_DEBUG
    ),
    Measure(
        "rollout_probs_diff_std", "standard deviation of |π − μ|", "1", "0 is agreement", "tokens, n − 1",
        "comparison", VERL_DEBUG,
    ),
    Measure(
        "rollout_actor_probs_pearson_corr", "correlation of π and μ", "1", "1 is agreement", "over tokens",
        "comparison", VERL_DEBUG + "; MiniMax-M1",
    ),
    Measure(
        "ess_token", "(Σρ)²/(N Σρ²)", "fraction of tokens", "χ²(π‖μ): 1 is agreement", "over tokens", "comparison",
        "Kong (1992); unclamped",
    ),
    Measure(
        "pareto_k", f"k̂ of the generalised Pareto distribution of ρ, {_LARGEST}", "1",
        f"above {LARGEST_TAIL_SHAPE:g} intervals of χ²(π‖μ) and k3 are too short; if d reaches 1, ESS is unreliable "
        "above 0.5, means of ρ above 0.7", "over tokens", "comparison", PSIS,
    ),
    Measure(
        "pareto_k_inverse", f"k̂ of the generalised Pareto distribution of 1/ρ, {_LARGEST}", "1",
        f"above {LARGEST_TAIL_SHAPE:g} the interval of χ²(μ‖π) is too short; if d reaches −1, χ²(μ‖π) is unreliable "
        "above 0.5",
        "over tokens", "comparison", PSIS,
    ),
    Measure(
        "pinsker_tv_bound", "½√χ², χ² = mean (ρ − 1)²", "1", "upper bound of D_TV(π, μ)", TOKEN_MEAN, "comparison",
        "TV ≤ ½√χ² by the Cauchy–Schwarz inequality",
    ),
    *(
        _token(f"tail({threshold})", f"1{{max(ρ, 1/ρ) > {threshold}}}", "1", "R3's F(τ)", "R3")
        for threshold in TAIL_THRESHOLDS
    ),
    *(
        _token(f"tail_below({name})", f"1{{d < −{_level(name)}}}", "1", "P_μ(π ≪ μ)", "Foreshock")
        for name in TAIL_ASYMMETRY_LEVELS
    ),
    *(
        _token(f"tail_above({name})", f"1{{d > {_level(name)}}}", "1", "P_μ(π ≫ μ)", "Foreshock")
        for name in TAIL_ASYMMETRY_LEVELS
    ),
    *(
        _token(
            f"tail_asymmetry({name})", f"1{{d < −{_level(name)}}} − ρ·1{{d > {_level(name)}}}", "1",
            "P_μ(π ≪ μ) − P_π(π ≫ μ): above 0 if π gives little mass to what μ samples", "Foreshock",
        )
        for name in TAIL_ASYMMETRY_LEVELS
    ),
    _token("k3_kl_per_entropy", "mean k3 / mean entropy", "1", "steadier than k3 as entropy falls", "Foreshock"),
    Measure(
        "surprisal_z", "Σ(−log μ(a) − H(μ)), standardised", "standard deviations",
        "0 if the logged μ is the sampling distribution; at most ±√G for G groups", "clustered by prompt group",
        "comparison", "martingale difference; Foreshock",
    ),
    *(
        Measure(
            f"{name}_{end}", f"Student's t interval of {name}, {end} end", unit, direction,
            "token mean, clustered by prompt group", "comparison", "ratio estimator, G − 1 degrees of freedom",
        )
        for name, (unit, direction) in WITH_INTERVAL.items()
        for end in ("low", "high")
    ),
    *(
        Measure(
            f"{name}_bootstrap_{end}", f"bootstrap-t interval of {name}, {end} end", *WITH_INTERVAL[name],
            "token mean, prompt groups resampled; needs one row per rollout", "comparison",
            f"Hall (1992), upper end at least Cox's; a {RANGE}",
        )
        for name in BOOTSTRAPPED
        for end in ("low", "high")
    ),
    Measure(
        "effective_groups", "(Σ S)²/Σ S², S = Σ k3 of a prompt group", "groups",
        "`prompt_groups` if all contribute the same; near 1 if one prompt carries k3",
        "over prompt groups", "comparison", "Kish (1965); Carter, Schnepel and Steigerwald (2017)",
    ),
)  # fmt: skip

_OF_SEQUENCES: tuple[Measure, ...] = (
    _sequence("k3_kl_seq_mean", "mean over the sequence of ρ − 1 − d", "nats",
              "KL(μ‖π) if μ sampled; biased if length depends on the tokens", SCHULMAN),
    _sequence("log_ppl_diff", "mean over the sequence of −d", "nats", "KL(μ‖π) if μ sampled, 1/T-weighted", VERL),
    _sequence("log_ppl_abs_diff", "|mean over the sequence of −d|", "nats", "0 is agreement", VERL),
    _sequence("sequence_log_ppl_abs_diff", "|Σ d|", "nats", "0 is agreement; grows with length",
              "length-decay learning-rate paper, eq. 8"),
    _sequence("geo_ratio", "exp(mean d)", "1", "1 is agreement", "Geo-RS, Geo-MIS"),
    _sequence("verl_chi2_seq", "exp(2 Σ d) − 1", "1", "χ²(π‖μ) of sequences if E ρ = 1", VERL_UNCLAMPED),
    Measure("ess_turn", "(Σρ)²/(N Σρ²), ρ of a turn", "fraction of turns", "1 is agreement",
            "over turns, in log space; NaN if not estimable", "sequence", "Kong (1992); unclamped"),
    Measure("ess_seq", "(Σρ)²/(N Σρ²), ρ of a sequence", "fraction of sequences", "1 is agreement",
            "over sequences, in log space; NaN if not estimable", "sequence", "Kong (1992); unclamped"),
    Measure("ess_seq_predicted", "exp(−2·KL·T), KL·T = Σ k3 / sequences", "fraction of sequences",
            "1 is agreement; predicts `ess_seq`, also if that is not estimable", "over sequences", "sequence",
            "log-normal weights"),
    _sequence("training_ppl", "exp(mean over the sequence of −log π)", "1", "π's perplexity; lower is surer", VERL),
    _sequence("training_log_ppl", "mean over the sequence of −log π", "nats", "π's log perplexity", VERL),
    _sequence("rollout_ppl", "exp(mean over the sequence of −log μ)", "1", "μ's perplexity; lower is surer", VERL),
    _sequence("rollout_log_ppl", "mean over the sequence of −log μ", "nats", "μ's log perplexity", VERL),
    _sequence("ppl_ratio", "exp(mean over the sequence of −d): π's perplexity over μ's", "1", "1 is agreement", VERL),
    Measure("log_ppl_diff_max", "mean over the sequence of −d", "nats", "large if π ≪ μ", "maximum over sequences",
            "sequence", VERL),
    Measure("log_ppl_diff_min", "mean over the sequence of −d", "nats", "low if π ≫ μ", "minimum over sequences",
            "sequence", VERL),
)  # fmt: skip

_WITH_ADVANTAGE = "mean over the tokens that have an advantage"


def _advantage(name: str, formula: str, unit: str, direction: str, source: str) -> Measure:
    return Measure(name, formula, unit, direction, _WITH_ADVANTAGE, "comparison", source)


_OF_ADVANTAGES: tuple[Measure, ...] = (
    _advantage("advantage_d_cov", "A·d − mean A · mean d", "nats · advantage",
               "above 0 if π moved towards what was rewarded", "covariance over tokens; Foreshock"),
    _advantage("advantage_skew_positive", "A·(ρ − 1)·1{A > 0}", "advantage",
               "the contribution of importance weights to the gradient of good tokens", "signed skew Σ A·(exp d − 1)"),
    _advantage("advantage_skew_negative", "A·(ρ − 1)·1{A < 0}", "advantage",
               "the contribution of importance weights to the gradient of bad tokens", "signed skew Σ A·(exp d − 1)"),
    _advantage("advantage_skew", "A·(ρ − 1)", "advantage", "0 if the mismatch does not depend on the advantage",
               "signed skew Σ A·(exp d − 1)"),
    _advantage("bad_update_fraction", f"1{{A < 0, μ − π ≥ {DPPO_PROBABILITY_GAP:g}}}", "1",
               "0 is healthy; counts tokens pushed down although π is far below μ", "DPPO"),
)  # fmt: skip

_COMPARISON_COUNTS: tuple[Measure, ...] = (
    _count("tokens", "model-generated tokens with two finite log-probs"),
    _count("low_probability_tokens", f"measured tokens with μ < {LOW_PROBABILITY:g}"),
    _count("rollouts", "rollouts compared"),
    _count("prompt_groups", "prompt groups compared; a rollout without a group is one by itself"),
    _count(
        "incomplete_rollouts",
        "rollouts with a token without a finite log-prob on one side; measures of turns and sequences leave them out",
    ),
    _count("nonfinite_target", "model-generated tokens whose target log-prob is NaN, ±inf or a placeholder"),
    _count("nonfinite_behaviour", "model-generated tokens whose behaviour log-prob is NaN, ±inf or a placeholder"),
)


def _step(name: str, formula: str, unit: str, direction: str = "", aggregation: str = "mean over rollouts") -> Measure:
    return Measure(name, formula, unit, direction, aggregation, "step", "Foreshock")


_LENGTH = "model-generated tokens of a response, before any filtering"

STEP_MEASURES: tuple[Measure, ...] = (
    _count("num_rollouts", "rollouts of the step", "step"),
    _count("num_tokens", "model-generated tokens of the step", "step"),
    _count("num_tool_tokens", "response tokens that the model did not sample", "step"),
    _step("response_length_mean", _LENGTH, "tokens", "a surge often comes before a collapse"),
    *(
        _step(f"response_length_p{percent}", _LENGTH, "tokens", "",
              f"{percent}th percentile over rollouts; exact below 256, else within 0.4 %")
        for percent in (50, 90, 99)
    ),
    _step("response_length_max", _LENGTH, "tokens", "", "maximum over rollouts"),
    _step("truncated_fraction", "finish reason `length`, or the length of the cap", "1", "0 is healthy"),
    _step("turns_mean", "turns of a rollout", "turns"),
    _step("reward_mean", "reward", "reward", "higher is better"),
    _step("finished_reward_mean", "reward", "reward", "higher is better", "mean over rollouts that were not cut"),
    _step("entropy_mean", "logged entropy", "nats", "falls as a run goes on", TOKEN_MEAN),
    _step("lag_mean", "trainer weights version − version that sampled", "versions", "0 is on-policy", TOKEN_MEAN),
    _step("lag_max", "trainer weights version − version that sampled", "versions", "0 is on-policy",
          "maximum over tokens"),
    _count("nonfinite_log_probs", "NaN, ±inf and placeholders among the log-probs of model-generated tokens", "step"),
)  # fmt: skip

_BY_LAG = "By lag"
_LAG_DIRECTION = "at lag 0 numerics alone; what is above it at other lags is staleness"
K3_BY_LAG: tuple[Measure, ...] = tuple(
    replace(
        _token(f"k3_kl(lag {lag})", "ρ − 1 − d", "nats", _LAG_DIRECTION, "Foreshock"),
        aggregation=f"mean over the tokens at lag {lag}",
        page_group=_BY_LAG,
    )
    for lag in LAG_BUCKETS
)
TOKENS_BY_LAG: tuple[Measure, ...] = tuple(
    replace(_count(f"tokens(lag {lag})", f"measured tokens at lag {lag}"), page_group=_BY_LAG) for lag in LAG_BUCKETS
)

COMPARISON_MEASURES: tuple[Measure, ...] = (
    *_PER_TOKEN,
    *_TOKEN_ONLY,
    *_OF_SEQUENCES,
    *_OF_ADVANTAGES,
    *_COMPARISON_COUNTS,
    *K3_BY_LAG,
    *TOKENS_BY_LAG,
)
MEASURES: tuple[Measure, ...] = (*COMPARISON_MEASURES, *STEP_MEASURES)

_BY_NAME = {**{measure.column: measure for measure in MEASURES}, **{measure.name: measure for measure in MEASURES}}


def measure_named(name: str) -> Measure:
    """Return the measure with this name or column; raises KeyError if there is none."""
    return _BY_NAME[name]
