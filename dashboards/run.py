"""The dashboard of one run over its training steps, read from PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from dashboards.layout import Dashboard, Row, Variable
from dashboards.panels import Level, Panel, PanelOptions, latest, levels_of, over_time
from dashboards.queries import PromQuery, SqlQuery
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.lags import NEARLY_ALL
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.healthy_ranges import required_range, threshold_number
from foreshock.interval_names import RANGE
from foreshock.measures.registry import K3_BY_LAG, TOKENS_BY_LAG, measure_named
from foreshock.measures.statistics.conditions import LOW_PROBABILITY
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE
from foreshock.model_kind import MODEL_KINDS
from foreshock.scorers import main_comparisons

TAIL = required_range("tail_2")
SHAPE = required_range("pareto_k")
TAIL_LEVELS = levels_of(TAIL)

# A step survives in the newest attempt that begins at or before it; older tails are superseded.
SURVIVES = (
    "{table}.attempt = (SELECT max(a.attempt) FROM attempts a "
    "WHERE a.run_id = {table}.run_id AND a.resume_step <= {table}.step)"
)
_SAME_STEP = "o.run_id = m.run_id AND o.attempt = m.attempt AND o.step = m.step"


def curves(comparison: str, measures: Sequence[str]) -> SqlQuery:
    """Return some measures of one comparison over steps; `comparison` is SQL: a literal or a variable."""
    columns = ", ".join(f'm."{measure_named(name).column}"' for name in measures)
    survives = SURVIVES.format(table="m")
    return SqlQuery(
        f"SELECT m.step, {columns} FROM measurements m "
        f"WHERE m.run_id = ${{run:sqlstring}} AND m.comparison = {comparison} AND {survives} ORDER BY m.step"
    )


def interval(comparison: str, measure: str) -> SqlQuery:
    """Return a measure and its interval: the bootstrap's, else Student's."""
    column = measure_named(measure).column
    ends = ", ".join(
        f'coalesce(m."{column}_bootstrap_{end}", m."{column}_{end}") AS "{column}_{end}"' for end in ("low", "high")
    )
    survives = SURVIVES.format(table="m")
    return SqlQuery(
        f'SELECT m.step, m."{column}", {ends} FROM measurements m '
        f"WHERE m.run_id = ${{run:sqlstring}} AND m.comparison = {comparison} AND {survives} ORDER BY m.step"
    )


def measure_by_comparison(measure: str, comparisons: Sequence[str]) -> SqlQuery:
    """Return the query of one measure of several comparisons, a column each."""
    column = measure_named(measure).column
    columns = ", ".join(
        f'max(m."{column}") FILTER (WHERE m.comparison = \'{name}\') AS "{name}"' for name in comparisons
    )
    survives = SURVIVES.format(table="m")
    return SqlQuery(
        f"SELECT m.step, {columns} FROM measurements m "
        f"WHERE m.run_id = ${{run:sqlstring}} AND {survives} GROUP BY m.step ORDER BY m.step"
    )


def at_lag_zero(comparison: str, measure: str, with_thresholds: bool = False) -> SqlQuery:
    """Return a measure as its range judges a step (`foreshock.diagnosis.lags`): k3 of the tokens at lag 0, another one
    of all tokens if nearly all are at lag 0. `with_thresholds` adds those of the run."""
    column = measure_named(measure).column
    of_lags = [f'coalesce(m."{each.column}", 0)' for each in TOKENS_BY_LAG]
    fresh, stale, enough = of_lags[0], " + ".join(of_lags[1:]), LEAST_TOKENS[column]
    of_all = f'CASE WHEN coalesce(m.tokens, {enough}) >= {enough} THEN m."{column}" END'
    # Without tokens by lag the mean lag of the step is all that is known, and none is lag 0.
    mean = f"SELECT o.lag_mean FROM measurements o WHERE {_SAME_STEP} AND o.comparison = '{STEP_ROW}'"
    judged = f"WHEN {fresh} + {stale} = 0 THEN CASE WHEN coalesce(round(({mean})), 0) = 0 THEN {of_all} END "
    if column == "k3_kl":
        of_fresh = f'm."{K3_BY_LAG[0].column}"'
        judged += f"WHEN {stale} > 0 THEN CASE WHEN {fresh} >= {enough} THEN {of_fresh} END ELSE {of_all}"
    else:
        judged += f"WHEN {fresh} >= {NEARLY_ALL} * ({fresh} + {stale}) THEN {of_all}"
    columns = f'CASE {judged} END AS "{column} at lag 0"'
    if with_thresholds:
        columns += f", {threshold_column(measure, 'warning')}, {threshold_column(measure, 'critical')}"
    survives = SURVIVES.format(table="m")
    return SqlQuery(
        f"SELECT m.step, {columns} FROM measurements m "
        f"WHERE m.run_id = ${{run:sqlstring}} AND m.comparison = {comparison} AND {survives} ORDER BY m.step"
    )


def threshold_column(measure: str, severity: Literal["warning", "critical"]) -> str:
    """Return a column with a threshold of the model kind of the run; an unknown kind has those of a dense model."""
    text = {kind: threshold_number(getattr(required_range(measure, kind), severity)) for kind in MODEL_KINDS}
    kind = "(SELECT coalesce(r.declared_model_kind, r.derived_model_kind) FROM runs r WHERE r.id = ${run:sqlstring})"
    return f"CASE WHEN {kind} = 'moe' THEN {text['moe']} ELSE {text['dense']} END AS \"{severity}\""


def scalars(*names: str) -> SqlQuery:
    """Scalars that the trainer reported, a column each."""
    columns = ", ".join(f"max(s.value) FILTER (WHERE s.name = '{name}') AS \"{name}\"" for name in names)
    survives = SURVIVES.format(table="s")
    return SqlQuery(
        f"SELECT s.step, {columns} FROM scalars s "
        f"WHERE s.run_id = ${{run:sqlstring}} AND {survives} GROUP BY s.step ORDER BY s.step"
    )


def shards() -> SqlQuery:
    """Return the shards of each closed step that arrived, and those that it should have."""
    survives = SURVIVES.format(table="s")
    return SqlQuery(
        "SELECT s.step, s.received_shards AS arrived, s.expected_shards AS expected FROM steps s "
        f"WHERE s.run_id = ${{run:sqlstring}} AND s.closed_at_us IS NOT NULL AND {survives} ORDER BY s.step"
    )


COMPARISON = "${comparison:sqlstring}"


def of_comparison(title: str, measures: Sequence[str], description: str, **options: Unpack[PanelOptions]) -> Panel:
    """Return a panel of measures of the chosen comparison over steps."""
    return Panel(title, "trend", (curves(COMPARISON, measures),), description, **options)


def of_rollouts(title: str, measures: Sequence[str], description: str, **options: Unpack[PanelOptions]) -> Panel:
    """Return a panel of measures of a step's rollouts over steps."""
    return Panel(title, "trend", (curves("'rollout'", measures),), description, **options)


def run_dashboard() -> Dashboard:
    """Return the dashboard of one run."""
    return Dashboard(
        uid="foreshock-run",
        title="Foreshock: one run over its steps",
        description="Mismatch, lengths, rewards and tails of one run, over training steps.",
        page=("The run's page", "/runs/${run:raw}"),
        variables=(
            Variable(
                "run",
                "Run",
                SqlQuery(
                    "SELECT coalesce(name, key) || ' (' || project || ')' AS __text, id AS __value FROM runs "
                    "WHERE deleted_at_us IS NULL ORDER BY created_at_us DESC"
                ),
            ),
            Variable(
                "comparison",
                "Comparison",
                SqlQuery(
                    "SELECT DISTINCT comparison FROM measurements WHERE run_id = ${run:sqlstring} "
                    "AND comparison <> 'rollout' ORDER BY comparison"
                ),
            ),
        ),
        rows=(
            Row("Mismatch", _mismatch()),
            Row("Tails and advantages", _tails()),
            Row("Rollouts", _rollouts()),
            Row("Training", _training()),
            Row("Newest step, live", _live()),
        ),
    )


def _mismatch() -> tuple[Panel, ...]:
    return (
        Panel(
            f"k3 per token at lag 0, {TRAINER_ROLLOUT}",
            "trend",
            (at_lag_zero(f"'{TRAINER_ROLLOUT}'", "k3_kl", with_thresholds=True),),
            "Mean of k3 over the tokens at lag 0, in nats, as the service's rules judge it; empty at steps with fewer "
            f"than {LEAST_TOKENS['k3_kl']}. The straight lines are the thresholds of the run's model kind; an unknown "
            "kind is judged as dense. 0 is not drawn on a log axis.",
            height=11,
            logarithmic=True,
        ),
        Panel(
            "k3 per token, every comparison",
            "trend",
            (measure_by_comparison("k3_kl", main_comparisons()),),
            "Mean of k3 over all tokens, in nats, whatever their lag. Against rollout, which sampled the tokens, it "
            "estimates KL(rollout‖target); otherwise it is the size of a link, no KL. 0 is not drawn on a log axis.",
            height=11,
            logarithmic=True,
        ),
        Panel(
            "k3 and its range",
            "trend",
            (interval(COMPARISON, "k3_kl"),),
            f"A {RANGE} by the bootstrap-t; by Student's t if there is only that. It is no bound. An end below 0 is "
            "not drawn on a log axis.",
            logarithmic=True,
        ),
        of_comparison(
            "k3 / entropy",
            ("k3_kl_per_entropy",),
            "Healthy k3 falls with entropy during a run; this ratio is steadier.",
            logarithmic=True,
        ),
        Panel(
            "Tail at lag 0: tokens off by more than a factor of two",
            "trend",
            (at_lag_zero(COMPARISON, "tail(2)"),),
            f"F(2) of R3: {TAIL.text}. Of steps with nearly all tokens at lag 0, for which the range holds.",
            unit="percentunit",
            minimum=0,
            levels=TAIL_LEVELS,
        ),
        of_comparison(
            "Tails: tokens off by more than a factor of 2, 5 and 10",
            ("tail(2)", "tail(5)", "tail(10)"),
            "Of all tokens, whatever their lag.",
            unit="percentunit",
            minimum=0,
        ),
        of_comparison(
            "Ratios: their mean, and E[exp|d|]",
            ("mean_ratio", "token_mult_prob_error"),
            "Token means of π/μ and of the multiplicative error. 1 is agreement.",
        ),
        of_comparison(
            "Difference of probabilities",
            ("rollout_probs_diff_mean",),
            "Token mean of |π − μ| as probabilities.",
            minimum=0,
        ),
        of_comparison(
            "Effective sample size of token weights",
            ("ess_token",),
            "(Σρ)²/(N Σρ²), unclamped. 1 is agreement.",
            unit="percentunit",
            maximum=1,
        ),
    )


def _tails() -> tuple[Panel, ...]:
    return (
        of_comparison(
            "Size of d",
            ("mean_abs_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d", "max_abs_d"),
            "Mean and quantiles of |log π − log μ| over tokens, in nats. 0 is not drawn on a log axis.",
            logarithmic=True,
        ),
        of_comparison(
            "Tokens of low probability: |d|",
            ("low_probability_abs_d", "mean_abs_d"),
            f"Mean |log π − log μ| in nats: of the tokens with μ < {LOW_PROBABILITY:g}, where a mismatch shows first, "
            "and of all tokens. Empty at steps without such tokens.",
            logarithmic=True,
        ),
        of_comparison(
            "Tokens of low probability: number",
            ("low_probability_tokens",),
            f"Tokens with μ < {LOW_PROBABILITY:g}. The mean |d| of few tokens is noisy.",
            minimum=0,
        ),
        of_comparison(
            "Tail asymmetry",
            ("tail_asymmetry(ln2)", "tail_asymmetry(1)", "tail_asymmetry(3)"),
            "P(d < −τ) minus the weight of d > τ. Above 0: π ≪ μ at sampled tokens. Symmetric noise gives 0.",
        ),
        of_comparison(
            "Shape of the tails, k̂",
            ("pareto_k", "pareto_k_inverse"),
            f"Of ρ and of 1/ρ. Above {LARGEST_TAIL_SHAPE:g} the range of k3 is too short. If ratios reach e: above "
            f"{SHAPE.warning} an effective sample size, above {SHAPE.critical} a mean of ratios cannot be trusted.",
        ),
        of_comparison(
            "χ² both ways",
            ("chi2_token", "reverse_chi2_token"),
            "If π ≪ μ, only the reverse one grows.",
            logarithmic=True,
        ),
        of_comparison(
            "Effective sample size of whole sequences",
            ("ess_seq", "ess_seq_predicted"),
            "Estimated, if the sample is large enough, and predicted: exp(−2·KL·T).",
            logarithmic=True,
        ),
        Panel(
            "Advantage and mismatch",
            "trend",
            (
                curves(
                    COMPARISON,
                    ("advantage_d_cov", "advantage_skew", "advantage_skew_positive", "advantage_skew_negative"),
                ),
            ),
            "cov(A, d), and the mean of A·(ρ − 1) by the sign of A. 0: the mismatch is independent of the reward.",
        ),
        of_comparison(
            "Bad updates",
            ("bad_update_fraction",),
            "Tokens with A < 0 and μ − π ≥ 0.5 (DPPO): the update lowers π further.",
            unit="percentunit",
            minimum=0,
        ),
    )


def _rollouts() -> tuple[Panel, ...]:
    lengths = ("response_length_mean", "response_length_p50", "response_length_p90", "response_length_max")
    return (
        of_rollouts(
            "Response length",
            lengths,
            "Model-generated tokens per rollout, before any filtering. The decay schedule counts from a surge.",
            minimum=0,
        ),
        of_rollouts(
            "Truncated responses",
            ("truncated_fraction",),
            "If many responses are cut, their mean length cannot show a surge.",
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        of_rollouts(
            "Measured entropy",
            ("entropy_mean",),
            "Token mean of the logged entropy, in nats.",
            minimum=0,
        ),
        Panel("Reward", "trend", (curves("'rollout'", ("reward_mean",)),), "Mean over rollouts."),
        Panel(
            "Shards",
            "trend",
            (shards(),),
            "Shards of each closed step. With fewer than expected, its figures are of the rollouts that arrived.",
            minimum=0,
        ),
        of_rollouts(
            "Log-probs that are not finite",
            ("nonfinite_log_probs",),
            "NaN and ±inf: counted, left out of every mean.",
            minimum=0,
        ),
    )


def _training() -> tuple[Panel, ...]:
    return (
        Panel("Learning rate", "trend", (scalars("lr"),), "As the trainer reports it.", unit="sci", width=8),
        Panel("Gradient norm", "trend", (scalars("grad_norm"),), "Before clipping.", width=8, logarithmic=True),
        Panel("Entropy", "trend", (scalars("entropy"),), "Nats per token, as the trainer reports it.", width=8),
    )


def _live() -> tuple[Panel, ...]:
    run = '{run="${run:raw}"}'
    return (
        over_time(
            "k3 by probability under the engine",
            f"foreshock_bucket_k3_kl_nats{run}",
            "{{bucket}}",
            "Token mean of k3 of the newest step, by the probability that the engine gave the token. A mismatch of "
            "precision is largest at low probabilities.",
            logarithmic=True,
        ),
        over_time(
            "Tokens by probability under the engine",
            f"foreshock_bucket_tokens{run}",
            "{{bucket}}",
            "Response tokens of the newest step.",
            logarithmic=True,
        ),
        over_time(
            "Lag",
            f"foreshock_lag_mean_versions{run}",
            "versions",
            "Token mean of the trainer's weights version minus the version that sampled. Ranges hold at lag 0.",
            minimum=0,
        ),
        Panel(
            "Advice",
            "timeseries",
            (
                PromQuery(f"foreshock_advice_revision{run}", "newest revision"),
                PromQuery(f"foreshock_advice_acknowledged_revision{run}", "acknowledged by the trainer"),
            ),
            "The trainer follows the advice if both lines are one. In mode shadow it is not asked to.",
            minimum=0,
        ),
        latest(
            "Mode of the advice",
            f"foreshock_advice_mode{run} == 1",
            "{{mode}}",
            "`apply`: the trainer multiplies its learning rate by the advised scale. `shadow`: nothing is changed.",
            width=8,
            height=6,
        ),
        latest(
            "Since the last sign of life",
            f"time() - foreshock_last_seen_timestamp_seconds{run}",
            "run",
            "Of the trainer's client: a heartbeat or data.",
            unit="s",
            width=8,
            height=6,
            levels=(Level(None, "green"), Level(300, "yellow"), Level(1800, "red")),
        ),
        Panel(
            "Log-probs that are not finite, newest step",
            "stat",
            (
                PromQuery(f"foreshock_nonfinite_log_probs{run}", "logged"),
                PromQuery(f"foreshock_nonfinite_target_log_probs{run}", "target of {{comparison}}"),
                PromQuery(f"foreshock_nonfinite_behaviour_log_probs{run}", "behaviour of {{comparison}}"),
            ),
            "NaN and ±inf: counted, left out of every mean.",
            width=8,
            height=6,
            levels=(Level(None, "green"), Level(1, "red")),
        ),
    )
