"""The dashboard of all runs, read from Prometheus: newest data, mismatch, advice, alerts, probes."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from dashboards.layout import Dashboard, Row, Variable
from dashboards.panels import RUN_OF_ROW, RUN_OF_SERIES, Level, Panel, PanelOptions, latest, levels_of, over_time
from dashboards.queries import PromQuery
from dashboards.run import TAIL, TAIL_LEVELS
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.healthy_ranges import required_range
from foreshock.model_kind import MODEL_KINDS, ModelKind

OPEN_ALERT_LEVELS = (Level(None, "green"), Level(1, "red"))
# Metrics carry a run's id; its name is a label of foreshock_run_info.
WITH_NAME = '* on (run) group_left (name) foreshock_run_info{name=~"$name"}'
CHOSEN = Variable("name", "Runs", PromQuery("label_values(foreshock_run_info, name)"), several=True)
VERDICTS = ("healthy", "unknown", "warning", "critical")

# Columns that Prometheus adds to every row.
PLUMBING = ("Time", "__name__", "job", "instance")


def of_runs(title: str, metric: str, legend: str, description: str, **options: Unpack[PanelOptions]) -> Panel:
    """Return a panel of a metric of every run over time, with the runs' names and a link to the page of each."""
    return replace(over_time(title, f"{metric} {WITH_NAME}", legend, description, **options), link=RUN_OF_SERIES)


def link_shares(title: str) -> Panel:
    """Return the panel of where the mismatch of each run comes from."""
    return of_runs(
        title,
        "foreshock_link_share_ratio",
        "{{name}} {{link}}",
        "Each link's share of E[d²] at the newest attributed step; a negative one cancels part of another.",
        unit="percentunit",
    )


def fleet_dashboard() -> Dashboard:
    """Return the dashboard of all runs."""
    return Dashboard(
        uid="foreshock-fleet",
        title="Foreshock: all runs now",
        description="Mismatch, advice and alerts of every exported run, over time.",
        page=("The runs' page", "/"),
        variables=(CHOSEN,),
        rows=(
            Row("Now", _now()),
            Row("Reward and mismatch", _mismatch()),
            Row("Learning rate", _advice()),
        ),
    )


def _now() -> tuple[Panel, ...]:
    verdicts = (
        f'{rank} * (foreshock_diagnosis_verdict{{verdict="{name}"}} == 1)' for rank, name in enumerate(VERDICTS)
    )
    return (
        Panel(
            "Worst runs",
            "table",
            (PromQuery(f"sort_desc(({' or '.join(verdicts)}) {WITH_NAME})", table=True),),
            "Each run with the verdict of its diagnosis, the gravest first. The run's page says since when and why.",
            width=24,
            height=8,
            hidden_columns=(*PLUMBING, "Value"),
            link=RUN_OF_ROW,
        ),
        latest(
            "Open alerts",
            "sum(foreshock_alerts_open) or vector(0)",
            "open",
            "Open alerts of every run. The run's page gives the reason and what to do.",
            width=6,
            height=6,
            levels=OPEN_ALERT_LEVELS,
        ),
        Panel(
            "Since the last data",
            "stat",
            (PromQuery(f"(time() - foreshock_last_ingest_timestamp_seconds) {WITH_NAME}", "{{name}}"),),
            "Time since the newest rollouts of each run. It grows if the trainer has stopped or its client spools.",
            width=9,
            height=6,
            unit="s",
            levels=(Level(None, "green"), Level(1800, "yellow"), Level(7200, "red")),
            link=RUN_OF_SERIES,
        ),
        latest(
            "Newest step",
            f"foreshock_step {WITH_NAME}",
            "{{name}}",
            "The newest closed step of each run.",
            width=9,
            height=6,
            link=RUN_OF_SERIES,
        ),
        Panel(
            "Runs",
            "table",
            (PromQuery("foreshock_run_info", table=True),),
            "Running runs that are exported, with their model kind.",
            width=24,
            height=7,
            hidden_columns=(*PLUMBING, "Value"),
            link=RUN_OF_ROW,
        ),
    )


def _mismatch_of_kind(kind: ModelKind) -> Panel:
    known = required_range("k3_kl", kind)
    runs, of_kind = ("dense models", '!="moe"') if kind == "dense" else ("mixtures of experts", '="moe"')
    unknown = " A run whose model kind is unknown is judged as dense." if kind == "dense" else ""
    expression = (
        f'foreshock_lag_zero_k3_kl_nats{{comparison="{TRAINER_ROLLOUT}"}} {WITH_NAME[:-1]},model_kind{of_kind}}}'
    )
    return Panel(
        f"k3 per token at lag 0, {TRAINER_ROLLOUT}, {runs}",
        "timeseries",
        (PromQuery(expression, "{{name}}"),),
        "Estimate of KL(rollout‖trainer) in nats at the newest closed step, of the tokens at lag 0, as the service's "
        f"rules judge it. Healthy: {known.text}.{unknown} Empty for runs without enough tokens at lag 0.",
        logarithmic=True,
        levels=levels_of(known),
        link=RUN_OF_SERIES,
    )


def _mismatch() -> tuple[Panel, ...]:
    return (
        of_runs("Reward", "foreshock_reward_mean", "{{name}}", "Mean reward of the newest closed step.", width=8),
        *(replace(_mismatch_of_kind(kind), width=8) for kind in MODEL_KINDS),
        Panel(
            "k3 per token of all tokens, every comparison",
            "timeseries",
            (PromQuery(f"foreshock_k3_kl_nats {WITH_NAME}", "{{name}} {{comparison}}"),),
            f"{TRAINER_ROLLOUT} at the newest closed step, whatever the lag; links of the chain at the newest step "
            "that a probe replayed.",
            logarithmic=True,
            link=RUN_OF_SERIES,
        ),
        over_time(
            f"Tail F(2) at lag 0, {TRAINER_ROLLOUT}",
            f'foreshock_lag_zero_tail_2_ratio{{comparison="{TRAINER_ROLLOUT}"}} {WITH_NAME}',
            "{{name}}",
            f"Tokens off by more than a factor of two: {TAIL.text}. Of steps with nearly all tokens at lag 0.",
            unit="percentunit",
            levels=TAIL_LEVELS,
            link=RUN_OF_SERIES,
        ),
        link_shares("Where the mismatch comes from"),
        of_runs(
            "Response length, mean",
            "foreshock_response_length_mean_tokens",
            "{{name}}",
            "Tokens per response of the newest closed step.",
            minimum=0,
        ),
        of_runs(
            "Shards that are missing",
            "(foreshock_step_expected_shards - foreshock_step_shards)",
            "{{name}}",
            "Of the newest closed step. Above 0, its figures are of the rollouts that arrived.",
            minimum=0,
        ),
        of_runs(
            "Truncated responses",
            "foreshock_truncated_ratio",
            "{{name}}",
            "Responses cut at the length cap. Above one half, the mean length cannot show a surge.",
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
    )


def _advice() -> tuple[Panel, ...]:
    return (
        Panel(
            "Learning-rate scale, advised and applied",
            "timeseries",
            (
                PromQuery(f"foreshock_learning_rate_advised_scale {WITH_NAME}", "{{name}} advised"),
                PromQuery(f"foreshock_learning_rate_applied_scale {WITH_NAME}", "{{name}} applied"),
            ),
            "Multiplies the trainer's own schedule. In shadow mode the trainer gets 1.0.",
            minimum=0,
            maximum=1,
            link=RUN_OF_SERIES,
        ),
        of_runs(
            "Verdict: critical or warning",
            'foreshock_diagnosis_verdict{verdict=~"critical|warning"}',
            "{{name}} {{verdict}}",
            "1 while the run's diagnosis has this verdict: its gravest open alert. The run's page says why.",
            minimum=0,
            maximum=1,
        ),
        Panel(
            "Open alerts by rule",
            "table",
            (PromQuery("foreshock_alerts_open > 0", table=True),),
            "The run's page gives the reason of each and what to do.",
            hidden_columns=PLUMBING,
            link=RUN_OF_ROW,
        ),
    )
