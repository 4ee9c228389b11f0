"""The dashboard of the service itself: is it up, is it fast enough, and do its background jobs run."""

from __future__ import annotations

from dashboards.layout import Dashboard, Row
from dashboards.panels import Level, Panel, latest, over_time
from dashboards.queries import PromQuery

_JOB = 'job="foreshock"'


def service_dashboard() -> Dashboard:
    """Return the dashboard of the service's health."""
    return Dashboard(
        uid="foreshock-service",
        title="Foreshock: service health",
        description="The service's processes. Behind one port, a scrape shows the process that answered it.",
        page=("The runs' page", "/"),
        rows=(Row("Now", _now()), Row("Load", _load()), Row("Process", _process()), Row("Background jobs", _jobs())),
        since="now-6h",
    )


def _now() -> tuple[Panel, ...]:
    return (
        latest(
            "Up",
            f"up{{{_JOB}}}",
            "{{instance}}",
            "1 if the newest scrape was answered.",
            width=6,
            height=6,
            levels=(Level(None, "red"), Level(1, "green")),
        ),
        Panel(
            "Version",
            "table",
            (PromQuery("foreshock_build_info", table=True),),
            "The version of the service, and the address of its pages.",
            width=9,
            height=6,
            hidden_columns=("Time", "__name__", "job", "Value"),
        ),
        latest(
            "Runs by state",
            "foreshock_runs",
            "{{state}}",
            "Runs that are not deleted.",
            width=9,
            height=6,
        ),
    )


def _load() -> tuple[Panel, ...]:
    return (
        Panel(
            "Tokens received per second",
            "timeseries",
            (PromQuery("sum(rate(foreshock_ingested_tokens_total[5m]))", "tokens"),),
            "Response tokens of running runs.",
            minimum=0,
        ),
        Panel(
            "Rollouts received per second",
            "timeseries",
            (PromQuery("sum(rate(foreshock_ingested_rollouts_total[5m]))", "rollouts"),),
            "Rollouts of running runs.",
            minimum=0,
        ),
        Panel(
            "Uploads",
            "timeseries",
            (
                PromQuery("foreshock_service_uploads_in_progress", "under way, {{instance}}"),
                PromQuery("foreshock_service_upload_places", "places, {{instance}}"),
            ),
            "If all places are taken, further uploads get 503 with Retry-After, and clients send them again.",
            minimum=0,
        ),
        over_time(
            "Duration of a scrape",
            f"scrape_duration_seconds{{{_JOB}}}",
            "{{instance}}",
            "Seconds that the service takes for /metrics.",
            unit="s",
            minimum=0,
        ),
        Panel(
            "Runs exported and cut",
            "timeseries",
            (
                PromQuery("foreshock_exporter_runs_exported", "exported"),
                PromQuery("foreshock_exporter_runs_cut", "cut"),
            ),
            "More running runs than FORESHOCK_EXPORTER_MAX_RUNS are cut: those with the oldest data.",
            minimum=0,
        ),
        over_time(
            "Trainers and pages that wait for a change",
            "foreshock_service_long_polls_waiting",
            "{{instance}}",
            "Long polls on advice and alerts.",
            minimum=0,
        ),
    )


def _process() -> tuple[Panel, ...]:
    return (
        over_time(
            "Writes to the database, p99",
            "foreshock_service_write_p99_seconds",
            "{{instance}}",
            "99th percentile of the newest writes, waiting included.",
            unit="s",
            minimum=0,
        ),
        over_time(
            "Longest wait for the event loop",
            "foreshock_service_event_loop_delay_max_seconds",
            "{{instance}}",
            "In the last minute. Every request waits so long for its turn.",
            unit="s",
            minimum=0,
        ),
        over_time(
            "Memory",
            "foreshock_service_resident_memory_bytes",
            "{{instance}}",
            "Resident memory of the process, without its decoders.",
            unit="bytes",
            minimum=0,
        ),
        latest(
            "Time since start",
            "time() - foreshock_service_start_time_seconds",
            "{{instance}}",
            "A small number that comes back again and again is a process that restarts.",
            unit="s",
            width=8,
            height=6,
        ),
        latest(
            "Decoders ready",
            "foreshock_service_decoders_ready",
            "{{instance}}",
            "1 if the processes that decode uploads have started.",
            width=8,
            height=6,
            levels=(Level(None, "red"), Level(1, "green")),
        ),
    )


def _jobs() -> tuple[Panel, ...]:
    return (
        over_time(
            "Runs of background jobs per minute",
            "60 * rate(foreshock_service_job_runs_total[5m])",
            "{{job}}",
            "Jobs of the process that answered the scrape.",
            minimum=0,
        ),
        over_time(
            "Failed runs in an hour",
            "increase(foreshock_service_job_failures_total[1h])",
            "{{job}}",
            "The service's log has the reasons.",
            minimum=0,
        ),
        over_time(
            "Time since a job's last run",
            "time() - foreshock_service_job_last_run_timestamp_seconds",
            "{{job}}",
            "A line that only rises is a job that hangs or is not due.",
            unit="s",
            minimum=0,
            width=24,
        ),
    )
