"""The dashboard of probes and hardware: who works, what waits, and what each kind of hardware measured."""

from __future__ import annotations

from dashboards.fleet import CHOSEN, PLUMBING, WITH_NAME, link_shares, of_runs
from dashboards.layout import Dashboard, Row
from dashboards.panels import RUN_OF_ROW, Panel, over_time
from dashboards.queries import PromQuery, SqlQuery
from dashboards.run import SURVIVES


def probes_dashboard() -> Dashboard:
    """Return the dashboard of probes and hardware."""
    return Dashboard(
        uid="foreshock-probes",
        title="Foreshock: probes and hardware",
        description="Workers, jobs, and the mismatch that each kind of hardware measured.",
        page=("The runs' page", "/"),
        variables=(CHOSEN,),
        rows=(
            Row("Workers and jobs", _jobs()),
            Row("Where the mismatch comes from", _links()),
            Row("Hardware", _hardware()),
        ),
    )


def _jobs() -> tuple[Panel, ...]:
    return (
        over_time(
            "Longest wait for a worker",
            "foreshock_probe_job_oldest_waiting_seconds",
            "{{accelerator}}",
            "Waiting time of the oldest queued job. If it grows, start a worker with that accelerator.",
            unit="s",
            minimum=0,
        ),
        over_time(
            "Workers",
            "foreshock_workers",
            "{{accelerator}}",
            "Live workers: they asked for a job or sent a heartbeat in the last minutes.",
            minimum=0,
        ),
        over_time(
            "Probe jobs by state",
            "sum by (accelerator, state) (foreshock_probe_jobs)",
            "{{accelerator}} {{state}}",
            "Queued, running, done, failed, skipped.",
            minimum=0,
        ),
        over_time(
            "Tries that failed in an hour",
            "increase(foreshock_probe_job_failures_total[1h])",
            "{{accelerator}}",
            "Tries that failed or whose lease expired. GET /v1/probes/{probe} gives the reasons.",
            minimum=0,
        ),
        Panel(
            "Jobs that were given up",
            "table",
            (
                SqlQuery(
                    "SELECT r.key AS run_key, p.run_id AS run, p.step, j.engine, j.state, j.tries, j.reason "
                    "FROM probe_jobs j JOIN probes p ON p.id = j.probe_id JOIN runs r ON r.id = p.run_id "
                    "WHERE j.state IN ('failed', 'skipped') AND r.deleted_at_us IS NULL "
                    "ORDER BY j.finished_at_us DESC NULLS LAST LIMIT 50"
                ),
            ),
            "The newest jobs without a result, with the reason.",
            width=18,
            height=6,
            link=RUN_OF_ROW,
        ),
    )


def _links() -> tuple[Panel, ...]:
    return (
        link_shares("Share of each link"),
        of_runs(
            "k3 of each link",
            "foreshock_link_k3_kl_nats",
            "{{name}} {{link}}",
            "In nats per token, at the newest attributed step.",
            logarithmic=True,
        ),
        Panel(
            "Newest attributed step",
            "table",
            (PromQuery(f"foreshock_attributed_step {WITH_NAME}", table=True),),
            "A run whose newest attribution is old has no probes at its newest checkpoints.",
            width=24,
            height=6,
            hidden_columns=PLUMBING,
            link=RUN_OF_ROW,
        ),
    )


def _hardware() -> tuple[Panel, ...]:
    return (
        Panel(
            "Mismatch by hardware",
            "table",
            (
                SqlQuery(
                    "SELECT s.accelerator, s.device_name, m.comparison, count(*) AS steps, "
                    "percentile_cont(0.5) WITHIN GROUP (ORDER BY m.k3_kl) AS k3_median, max(m.k3_kl) AS k3_largest "
                    "FROM scores s JOIN measurements m ON m.run_id = s.run_id AND m.attempt = s.attempt "
                    "AND m.step = s.step AND split_part(m.comparison, '/', 1) = s.scorer "
                    f"WHERE {SURVIVES.format(table='s')} "
                    "GROUP BY s.accelerator, s.device_name, m.comparison ORDER BY 1, 2, 3"
                ),
            ),
            "k3 in nats per token of comparisons whose target was scored on that hardware, over all runs and steps.",
            width=24,
        ),
        Panel(
            "Scores by hardware",
            "table",
            (
                SqlQuery(
                    "SELECT s.accelerator, s.device_name, s.scorer, count(*) AS scores, sum(s.tokens) AS tokens, "
                    "to_timestamp(max(s.published_at_us) / 1e6) AS newest FROM scores s "
                    "GROUP BY s.accelerator, s.device_name, s.scorer ORDER BY 1, 2, 3"
                ),
            ),
            "What was scored where.",
            width=24,
        ),
    )
