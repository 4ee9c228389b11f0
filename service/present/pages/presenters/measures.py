"""The presenter of the measures of a step: the most important ones, then groups to open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foreshock.interval_names import CALLED_INTERVAL, RANGE
from foreshock.measures.estimators.reliability import effective_of_all, interval_warning
from foreshock.measures.registry import measure_named
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE
from foreshock.model_kind import ModelKind
from foreshock_service.present.pages.formatting import count, judged_value, number
from foreshock_service.present.pages.step_models import MeasureGroup, MeasureRow, Value

Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class _Group:
    title: str
    measures: tuple[str, ...]
    not_logged: str = ""


# In the order of reading; the API has the rest.
GROUPS = (
    _Group(
        "",
        (
            "k3_kl", "effective_groups", "kl", "mean_ratio", "mean_abs_d", "max_abs_d", "chi2_token",
            "reverse_chi2_token", "tv_token", "tail(2)", "tail_asymmetry(ln2)", "pareto_k", "ess_token", "ess_seq",
            "ess_seq_predicted",
            "rollout_probs_diff_mean", "tokens", "rollouts", "nonfinite_target", "nonfinite_behaviour",
        ),
    ),
    _Group(
        "Distribution and tails of d",
        (
            "rms_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d", "min_d", "max_d", "tail_below(ln2)",
            "tail_above(ln2)", "tail_below(1)", "tail_above(1)", "tail_asymmetry(1)", "tail_below(3)", "tail_above(3)",
            "tail_asymmetry(3)", "pareto_k_inverse", "pinsker_tv_bound", "zero_fraction", "low_probability_abs_d",
            "low_probability_tokens",
        ),
    ),
    _Group(
        "With advantages",
        (
            "advantage_d_cov", "advantage_skew", "advantage_skew_positive", "advantage_skew_negative",
            "bad_update_fraction",
        ),
        "These rollouts carry no advantages: the column advantage holds them, for each rollout or each token.",
    ),
    _Group(
        "Of whole turns and sequences",
        (
            "ess_turn", "geo_ratio", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_min", "log_ppl_diff_max",
            "sequence_log_ppl_abs_diff", "verl_chi2_seq", "k3_kl_seq_mean", "training_ppl", "rollout_ppl", "ppl_ratio",
        ),
    ),
    _Group(
        "Against entropy",
        ("k3_kl_per_entropy", "surprisal_z"),
        "These rollouts carry no entropies of the behaviour score: the column entropy holds them.",
    ),
    _Group(
        "As other tools report it",
        (
            "token_mult_prob_error", "rollout_probs_diff_max", "rollout_probs_diff_std",
            "rollout_actor_probs_pearson_corr", "verl_chi2_token", "k2_kl",
        ),
    ),
)  # fmt: skip

# A heavy tail harms a mean only if ratios reach e, |d| ≥ 1: the measure that tells how far they reach.
PARETO_FAR = 1.0
INTERVALS_NOTE = (
    f'"95 %" is a bootstrap-t interval by prompt group, "range" a {RANGE}, "Student\'s t" another: both may cover '
    f"the true value less often. k3 has no 95 % interval if k̂ is above {LARGEST_TAIL_SHAPE:g}."
)
_PARETO_REACH = {"pareto_k": "max_d", "pareto_k_inverse": "min_d"}


def measure_groups(
    values: Mapping[str, Values], comparisons: Sequence[str], model_kind: ModelKind | None
) -> list[MeasureGroup]:
    """Return the tables of these comparisons; a group without any value tells what to log."""
    columns = [values[comparison] for comparison in comparisons]
    return [_group(group, columns, model_kind) for group in GROUPS]


def _group(group: _Group, columns: Sequence[Values], model_kind: ModelKind | None) -> MeasureGroup:
    names = [measure_named(name).column for name in group.measures]
    known = any(column.get(name) is not None for column in columns for name in names)
    if group.not_logged and not known:
        return MeasureGroup(group.title, (), group.not_logged)
    return MeasureGroup(group.title, [_row(name, columns, model_kind) for name in group.measures])


def _row(name: str, columns: Sequence[Values], model_kind: ModelKind | None) -> MeasureRow:
    measure = measure_named(name)
    meaning = ": ".join(part for part in (measure.formula, measure.direction) if part)
    values = [_with_interval(measure.column, column, model_kind) for column in columns]
    return MeasureRow(measure.name, meaning, values)


def _with_interval(column: str, values: Values, model_kind: ModelKind | None) -> Value:
    """Return the value with its bootstrap-t interval, or Student's t if there is only that; called what it is."""
    value = measure_value(column, values.get(column), model_kind)
    if column == "effective_groups":
        return replace(value, text=effective_of_all(values))
    if column in _PARETO_REACH and not _ratios_reach_e(values.get(_PARETO_REACH[column])):
        value = replace(value, tone="")
    reliable = column in CALLED_INTERVAL and values.get("prompt_groups") is not None and not interval_warning(values)
    for kind, name in (("_bootstrap", "95 %: " if reliable else "range: "), ("", "Student's t: ")):
        low, high = values.get(f"{column}{kind}_low"), values.get(f"{column}{kind}_high")
        if low is not None and high is not None:
            return replace(value, interval=f"{name}{number(low)} to {number(high)}")
    return value


def measure_value(column: str, value: float | None, model_kind: ModelKind | None) -> Value:
    """Return a measure's value as text, with the tone of its range if it has one."""
    if measure_named(column).column_type == "integer":
        return Value(count(None if value is None else int(value)))
    return judged_value(column, value, model_kind)


def _ratios_reach_e(largest_d: float | None) -> bool:
    return largest_d is not None and abs(largest_d) >= PARETO_FAR
