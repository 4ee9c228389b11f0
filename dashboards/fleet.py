"""The dashboard of all runs, read from Prometheus: newest data, mismatch, advice, alerts, probes."""

from __future__ import annotations

from dashboards.panels import Dashboard, Level, Panel, PromQuery, Row, levels_of
from dashboards.run import TAIL, TAIL_LEVELS
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.model_kind import MODEL_KINDS, ModelKind
from foreshock.ranges import required_range

OPEN_ALERT_LEVELS = (Level(None, "green"), Level(1, "red"))
# Metrics carry a run's id; its name is a label of foreshock_run_info.
WITH_NAME = "* on (run) group_left (name) foreshock_run_info"

# Columns that Prometheus adds to every row.
PLUMBING = ("Time", "__name__", "job", "instance")


def fleet_dashboard() -> Dashboard:
    """Return the dashboard of all runs."""
    return Dashboard(
        uid="foreshock-fleet",
        title="Foreshock: all runs now",
        description="Mismatch, advice and alerts of every exported run, over time.",
        rows=(
            Row("Now", _now()),
            Row("Mismatch", _mismatch()),
            Row("Learning rate", _advice()),
            Row("Probes", _probes()),
        ),
    )


def _now() -> tuple[Panel, ...]:
    return (
        Panel(
            "Open alerts",
            "stat",
            (PromQuery("sum(foreshock_alerts_open) or vector(0)", "open"),),
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
        ),
        Panel(
            "Newest step",
            "stat",
            (PromQuery(f"foreshock_step {WITH_NAME}", "{{name}}"),),
            "The newest closed step of each run.",
            width=9,
            height=6,
        ),
        Panel(
            "Runs",
            "table",
            (PromQuery("foreshock_run_info", table=True),),
            "Running runs that are exported, with their model kind.",
            width=24,
            height=7,
            hidden_columns=(*PLUMBING, "Value"),
        ),
    )


def _mismatch_of_kind(kind: ModelKind) -> Panel:
    known = required_range("k3_kl", kind)
    runs, of_kind = ("dense models", '!="moe"') if kind == "dense" else ("mixtures of experts", '="moe"')
    unknown = " A run whose model kind is unknown is judged as dense." if kind == "dense" else ""
    expression = f'foreshock_k3_kl_nats{{comparison="{TRAINER_ROLLOUT}"}} {WITH_NAME}{{model_kind{of_kind}}}'
    return Panel(
        f"k3 per token, {TRAINER_ROLLOUT}, {runs}",
        "timeseries",
        (PromQuery(expression, "{{name}}"),),
        f"Estimate of KL(rollout‖trainer) in nats at the newest closed step. Healthy at lag 0: {known.text}.{unknown}",
        logarithmic=True,
        levels=levels_of(known),
    )


def _mismatch() -> tuple[Panel, ...]:
    return (
        *(_mismatch_of_kind(kind) for kind in MODEL_KINDS),
        Panel(
            "k3 per token, other comparisons",
            "timeseries",
            (
                PromQuery(
                    f'foreshock_k3_kl_nats{{comparison!="{TRAINER_ROLLOUT}"}} {WITH_NAME}', "{{name}} {{comparison}}"
                ),
            ),
            "Links of the chain, at the newest step that a probe replayed.",
            logarithmic=True,
        ),
        Panel(
            f"Tail F(2), {TRAINER_ROLLOUT}",
            "timeseries",
            (PromQuery(f'foreshock_tail_2_ratio{{comparison="{TRAINER_ROLLOUT}"}} {WITH_NAME}', "{{name}}"),),
            f"Tokens off by more than a factor of two: {TAIL.text}.",
            unit="percentunit",
            levels=TAIL_LEVELS,
        ),
        Panel(
            "Where the mismatch comes from",
            "timeseries",
            (PromQuery(f"foreshock_link_share_ratio {WITH_NAME}", "{{name}} {{link}}"),),
            "Each link's share of E[d²] at the newest attributed step; a negative one cancels part of another.",
            unit="percentunit",
        ),
        Panel(
            "Response length, mean",
            "timeseries",
            (PromQuery(f"foreshock_response_length_mean_tokens {WITH_NAME}", "{{name}}"),),
            "Tokens per response of the newest closed step.",
            minimum=0,
        ),
        Panel(
            "Shards that are missing",
            "timeseries",
            (PromQuery(f"(foreshock_step_expected_shards - foreshock_step_shards) {WITH_NAME}", "{{name}}"),),
            "Of the newest closed step. Above 0, its figures are of the rollouts that arrived.",
            minimum=0,
        ),
        Panel(
            "Truncated responses",
            "timeseries",
            (PromQuery(f"foreshock_truncated_ratio {WITH_NAME}", "{{name}}"),),
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
        ),
        Panel(
            "Open alerts by rule",
            "table",
            (PromQuery("foreshock_alerts_open > 0", table=True),),
            "The run's page gives the reason of each and what to do.",
            hidden_columns=PLUMBING,
        ),
    )


def _probes() -> tuple[Panel, ...]:
    return (
        Panel(
            "Longest wait for a worker",
            "timeseries",
            (PromQuery("foreshock_probe_job_oldest_waiting_seconds", "{{accelerator}}"),),
            "Waiting time of the oldest queued job. If it grows, start a worker with that accelerator.",
            unit="s",
            minimum=0,
        ),
        Panel(
            "Workers",
            "timeseries",
            (PromQuery("foreshock_workers", "{{accelerator}}"),),
            "Live workers: they asked for a job or sent a heartbeat in the last minutes.",
            minimum=0,
        ),
        Panel(
            "Probe jobs by state",
            "timeseries",
            (PromQuery("sum by (accelerator, state) (foreshock_probe_jobs)", "{{accelerator}} {{state}}"),),
            "Queued, running, done, failed, skipped.",
            minimum=0,
        ),
        Panel(
            "Tries that failed in an hour",
            "timeseries",
            (PromQuery("increase(foreshock_probe_job_failures_total[1h])", "{{accelerator}}"),),
            "GET /v1/probes/{probe} gives the reasons.",
            minimum=0,
        ),
    )
