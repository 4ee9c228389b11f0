"""Tables of a step: the links of its chain, measures, corrections."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreshock.api.attribution import AttributionRecord
from foreshock.api.steps import TheoryRecord
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.lag_zero import holds_for_all_tokens
from foreshock.diagnosis.lags import StepLags
from foreshock.diagnosis.wording import as_sentence
from foreshock.interval_names import RANGE, RANGE_NOTE, ends_in_words
from foreshock.measures.estimators.bootstrap import effective_of_all
from foreshock.measures.registry import COMPARISON_MEASURES, K3_BY_LAG, measure_named
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE
from foreshock.model_kind import ModelKind
from foreshock_service.present.pages.figures import Figure, Missing, attribution
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.rendering import DASH, Value, count, judged_value, number
from foreshock_service.replay.attribution import service as attributions
from foreshock_service.runs import attempts, corrections, measurements

# A step whose probe is not complete may have replayed scores but no attribution, so a few older steps are tried.
STEPS_TRIED = 5


def newest_attribution(viewing: Viewing, run_id: str) -> AttributionRecord | str | None:
    """Return the newest attribution of a run; without one, the reason why the newest replayed step has none."""
    why = None
    for step in attributions.newest_replayed_steps(viewing.session, viewing.principal, run_id, STEPS_TRIED):
        found = attribution_of(viewing, run_id, step)
        if isinstance(found, AttributionRecord):
            return found
        why = why or found
    return why


def attribution_of(viewing: Viewing, run_id: str, step: int) -> AttributionRecord | str | None:
    """Return the attribution of a step; the reason if its scores give none (yet); None if nothing was replayed."""
    try:
        return attributions.attribution_of_step(viewing.session, viewing.principal, run_id, step, None)
    except attributions.AttributionNotFound:
        return None
    except (attributions.AttributionNotPossible, attributions.AttributionPending) as error:
        return as_sentence(error.detail)


def figure_of(read: AttributionRecord | str | None) -> Figure | Missing:
    """Return the figure of an attribution with its conclusions; `read` is an answer of `attribution_of`."""
    notes = [*sentences_of(read), *notes_of(read)] if isinstance(read, AttributionRecord) else []
    return attribution.attribution_figure(read, notes)


def sentences_of(read: AttributionRecord) -> list[str]:
    return [conclusion.sentence for conclusion in read.conclusions]


def notes_of(read: AttributionRecord) -> list[str]:
    """Return notes on the rollouts, scores and intervals behind the numbers of an attribution."""
    notes: list[str] = []
    if read.stale:
        notes.append("Scores or rollouts have arrived since; a new attribution is being computed.")
    if read.missing:
        notes.append(f"Not scored; the adjacent links are merged: {', '.join(read.missing)}.")
    if read.exact_kl():
        notes.append("(exact): KL(μ‖π) over the whole vocabulary in place of k3, which is its sampled estimate.")
    notes.append(f"Shares have a {RANGE}, by {read.method}. {RANGE_NOTE}")
    if read.from_sample:
        notes.append(f"Over {read.rollouts} of {read.of_rollouts} rollouts.")
    return notes


Values = Mapping[str, float | None]
TheoryRow = tuple[str, str, str]
"""Name, value and meaning."""


@dataclass(frozen=True, slots=True)
class MeasureRow:
    """One measure: a value for each comparison of the page, in the page's order."""

    name: str
    meaning: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class MeasureGroup:
    """Measures that are read together. The first group has no title and is always shown."""

    title: str
    rows: Sequence[MeasureRow]
    missing: str = ""


# In reading order; the API has the other measures, and the registry assigns further ones to a group.
GROUPS: Mapping[str, Sequence[str]] = {
    "": (
        "k3_kl", "effective_groups", "kl", "mean_ratio", "mean_abs_d", "max_abs_d", "chi2_token", "reverse_chi2_token",
        "tv_token", "tail(2)", "tail_asymmetry(ln2)", "pareto_k", "ess_token", "ess_seq", "ess_seq_predicted",
        "rollout_probs_diff_mean", "tokens", "rollouts", "nonfinite_target", "nonfinite_behaviour",
    ),
    "Distribution and tails of d": (
        "rms_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d", "min_d", "max_d", "tail_below(ln2)",
        "tail_above(ln2)", "tail_below(1)", "tail_above(1)", "tail_asymmetry(1)", "tail_below(3)", "tail_above(3)",
        "tail_asymmetry(3)", "pareto_k_inverse", "pinsker_tv_bound", "zero_fraction", "low_probability_abs_d",
        "low_probability_tokens",
    ),
    "With advantages": (
        "advantage_d_cov", "advantage_skew", "advantage_skew_positive", "advantage_skew_negative",
        "bad_update_fraction",
    ),
    "Of whole turns and sequences": (
        "ess_turn", "geo_ratio", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_min", "log_ppl_diff_max",
        "sequence_log_ppl_abs_diff", "verl_chi2_seq", "k3_kl_seq_mean", "training_ppl", "rollout_ppl", "ppl_ratio",
    ),
    "Against entropy": ("k3_kl_per_entropy", "surprisal_z"),
    "By lag": (),
    "As other tools report it": (
        "token_mult_prob_error", "rollout_probs_diff_max", "rollout_probs_diff_std", "rollout_actor_probs_pearson_corr",
        "verl_chi2_token", "k2_kl",
    ),
}  # fmt: skip
_NOT_LOGGED: Mapping[str, str] = {
    "With advantages": "These rollouts carry no advantages: the column advantage holds them, for each rollout or each "
    "token.",
    "Against entropy": "These rollouts carry no entropies of the behaviour score: the column entropy holds them.",
    "By lag": "These rollouts carry no weights versions: the column weights_version holds them.",
}

_AT_A_GLANCE = ("k3_kl", "max_abs_d", "tail(2)", "ess_token", "rollout_probs_diff_mean")

# The |d| at which ratios reach e. A heavy tail harms a mean only if ratios reach this far.
PARETO_FAR = 1.0
INTERVALS_NOTE = (
    f'"range" is a {RANGE} by the bootstrap-t, "Student\'s t" another. {RANGE_NOTE} If k̂ is above '
    f"{LARGEST_TAIL_SHAPE:g}, that of k3 is known to be too short."
)
_PARETO_REACH = {"pareto_k": "max_d", "pareto_k_inverse": "min_d"}


def measures_at_a_glance(groups: Sequence[MeasureGroup], values: Values) -> list[MeasureRow]:
    """Return the rows by which a step is judged; if its lags are mixed, k3 at lag 0 comes first."""
    rows = {row.name: row for group in groups for row in group.rows}
    lags = _lags_of(values)
    names = (K3_BY_LAG[0].name, *_AT_A_GLANCE) if lags.is_mixed else _AT_A_GLANCE
    return [rows[name] for name in names if name in rows]


def measure_groups(
    values: Mapping[str, Values], comparisons: Sequence[str], model_kind: ModelKind | None
) -> list[MeasureGroup]:
    """Return the tables of these comparisons; a group without any value says what to log."""
    columns = [values[comparison] for comparison in comparisons]
    return [_group(title, columns, model_kind) for title in GROUPS]


def _group(title: str, columns: Sequence[Values], model_kind: ModelKind | None) -> MeasureGroup:
    registered = (each.name for each in COMPARISON_MEASURES if title and each.page_group == title)
    measures = [measure_named(name) for name in (*GROUPS[title], *registered)]
    # A count of 0 is shown as empty: no token has that lag. Only counts are integers.
    nothing = {each.column: (None, 0) if each.column_type == "integer" else (None,) for each in measures}
    known = any(column.get(name) not in none for column in columns for name, none in nothing.items())
    if title in _NOT_LOGGED and not known:
        return MeasureGroup(title, (), _NOT_LOGGED[title])
    return MeasureGroup(
        title,
        [
            MeasureRow(
                each.name,
                ": ".join(part for part in (each.formula, each.direction) if part),
                [_with_interval(each.column, column, model_kind) for column in columns],
            )
            for each in measures
        ],
    )


def _with_interval(column: str, values: Values, model_kind: ModelKind | None) -> Value:
    """Return the value with its bootstrap-t interval, else with Student's t interval; the text names the method."""
    value = measure_value(column, values.get(column), model_kind)
    lags = _lags_of(values)
    if column == K3_BY_LAG[0].column and lags.numerics is not None:
        # The healthy range of k3 is for tokens at lag 0.
        value = replace(value, tone=judged_value("k3_kl", lags.numerics, model_kind).tone)
    if not holds_for_all_tokens(column, lags):
        value = replace(value, tone="")
    if column == "effective_groups":
        return replace(value, text=effective_of_all(values))
    if column in _PARETO_REACH and abs(values.get(_PARETO_REACH[column]) or 0.0) < PARETO_FAR:
        value = replace(value, tone="")
    for kind, name in (("_bootstrap", "range: "), ("", "Student's t: ")):
        low, high = values.get(f"{column}{kind}_low"), values.get(f"{column}{kind}_high")
        if low is not None and high is not None:
            # The k1 estimate of KL, the mean of −d, may be negative.
            mean = abs(values.get(column) or 0.0)
            return replace(value, interval=name + ends_in_words(mean, low, high, number))
    return value


def _lags_of(values: Values) -> StepLags:
    """Return the lags of a comparison's tokens; all comparisons have the same columns of lags."""
    return StepLags.of({f"{TRAINER_ROLLOUT}:{name}": each for name, each in values.items() if each is not None})


def measure_value(column: str, value: float | None, model_kind: ModelKind | None) -> Value:
    if measure_named(column).column_type == "integer":
        return Value(count(None if value is None else int(value)))
    return judged_value(column, value, model_kind)


def corrections_part(viewing: Viewing, run_id: str, step: int) -> dict[str, Any]:
    """Return the corrections of trainer/rollout at the thresholds in use, and the theory of the same step."""
    try:
        key = attempts.visible_step(viewing.session, viewing.principal, run_id, step, None)
        pair = corrections.read_pair(viewing.session, key, TRAINER_ROLLOUT)
    except (measurements.MeasurementNotFound, measurements.StatisticsOutOfDate) as error:
        return {"rows": (), "missing": f"{error.detail}."}
    evaluations = corrections.usual_evaluations(pair)
    titles: dict[str, list[str]] = {}
    for found in evaluations:
        if found.not_estimable:
            titles.setdefault(found.not_estimable, []).append(found.correction.title)
    return {
        "comparison": TRAINER_ROLLOUT,
        "rows": [found for found in evaluations if not found.not_estimable],
        "has_advantages": any(math.isfinite(found.advantage_distortion) for found in evaluations),
        "has_turns": any(math.isfinite(found.affected.untouched.turns_mean) for found in evaluations),
        "not_estimable": [f"{' and '.join(names)}: {reason}." for reason, names in titles.items()],
        "notes": [as_sentence(note) for note in dict.fromkeys(note for found in evaluations for note in found.notes)],
        "theory": list(_theory_rows(corrections.theory_of_pair(viewing.session, pair))),
        "missing": "",
    }


def _theory_rows(theory: TheoryRecord) -> Iterator[TheoryRow]:
    bias, pinsker = theory.bias, theory.pinsker
    reach = "no interval: too few prompts"
    if math.isfinite(bias.high):
        reach = f"{RANGE} {number(bias.low)} to {number(bias.high)}"
    yield (
        "Bound of the gradient's bias, estimated",
        f"{number(bias.per_unit)} · B",
        f"B·E|ρ_seq − 1|·T·|R|, estimated from these rollouts ({reach}): the bias itself may be larger than this "
        "estimate. B bounds the gradient of one token's log-prob. "
        f"The trivial bound 2·B·T·max|R|, at the mean length: {number(bias.trivial)} · B."
        + "".join(f" {as_sentence(note)}" for note in bias.notes),
    )
    # The page has no exact Δmax; the API accepts one.
    if theory.horizon.not_estimable is not None:
        yield ("The same, as 2·B·Δmax·T²", DASH, as_sentence(theory.horizon.not_estimable))
    yield (
        "Total variation of a token, at most",
        number(pinsker.bound),
        f"½√χ² of the token mean of χ². The estimate of the total variation itself is {number(pinsker.tv_token)}."
        + "".join(f" {as_sentence(note)}" for note in pinsker.notes),
    )
    if theory.sequence_chi2 is not None:
        of_sequence = theory.sequence_chi2
        value = number(of_sequence.value) if of_sequence.log10 < 5 else _power_of_ten(of_sequence.log10)
        yield (
            "E ρ_seq², extrapolated",
            value,
            (
                f"(1 + χ²)^T with the mean χ² and the mean length, {of_sequence.length:.4g} tokens: true if tokens "
                "were independent and all alike. An extrapolation, no bound."
            ),
        )
    yield from _gradient_rows(theory)


def _gradient_rows(theory: TheoryRecord) -> Iterator[TheoryRow]:
    noise, step = theory.gradient, theory.step_noise
    name = "Variance of a prompt's gradient, V̂"
    if noise is None:
        yield (name, DASH, f"Not estimable: {theory.gradient_missing}.")
        return
    notes = "".join(f" {as_sentence(note)}" for note in noise.notes)
    yield (
        name,
        number(noise.variance),
        f"(‖g_b‖² − ‖g_B‖²)/(1/b − 1/B); of the whole batch {number(noise.of_batch)}.{notes}",
    )
    if step is None:
        why = "neither the step nor the run has a learning rate; log the scalar `lr`"
        yield ("Noise of a step", DASH, f"Not estimable: {why}.")
        return
    yield (
        "Noise of a step at η, and at η/2",
        f"{number(step.at_learning_rate)} · L, {number(step.at_half)} · L",
        (
            f"(Lη²/2)·Var with η = {number(theory.learning_rate)} ({theory.learning_rate_source}); L bounds the "
            "curvature of the objective. The bias adds to it, and norms cannot show it."
        ),
    )


def _power_of_ten(exponent: float) -> str:
    return "too large" if math.isinf(exponent) else f"10^{exponent:.3g}" if exponent < 100 else f"10^{exponent:.0f}"
