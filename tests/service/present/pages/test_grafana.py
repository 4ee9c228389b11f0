"""Links to Grafana: with its address, from the page of a run and of a step to the run's dashboard."""

from __future__ import annotations

from dashboards.run import run_dashboard as dashboard
from foreshock_service.platform.settings import Settings
from foreshock_service.present.pages.presenters.alerts import run_dashboard
from tests.service.present.pages.conftest import Site


def test_link_chooses_the_run_in_its_dashboard() -> None:
    settings = Settings(grafana_url="https://grafana.example/")
    built = dashboard()
    assert "run" in [variable.name for variable in built.variables]
    assert run_dashboard(settings, "run_1") == f"https://grafana.example/d/{built.uid}?var-run=run_1"


def test_without_an_address_there_is_no_link(site: Site) -> None:
    assert run_dashboard(Settings(), "run_1") is None
    for path in (site.run.address, f"{site.run.address}/steps/5"):
        assert "Grafana" not in site.http.get(path).raise_for_status().text
