"""Links to Grafana, if the service knows its address."""

from __future__ import annotations

from urllib.parse import urlencode

from foreshock_service.platform.settings import Settings

RUN_DASHBOARD = "foreshock-run"
"""The uid of the dashboard of a run: dashboards/run.py."""


def run_dashboard(settings: Settings, run_id: str) -> str | None:
    """Return the address of the run's dashboard, with the run chosen; None without FORESHOCK_GRAFANA_URL."""
    if not settings.grafana_url:
        return None
    return f"{settings.grafana_url.rstrip('/')}/d/{RUN_DASHBOARD}?{urlencode({'var-run': run_id})}"
