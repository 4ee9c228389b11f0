"""The page of a run as one file: opened from disk without a network, it shows what the service's page shows."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import BrowserContext, Page

from foreshock_service.platform.keys import Scope
from foreshock_service.present.pages.presenters.figures import RUN_PLOTS
from foreshock_service.present.pages.presenters.saved import bundled
from tests.service.keys import make_key
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import SentRun, Site

LARGEST_BYTES = 2_000_000


def saved(site: Site, run: SentRun, folder: Path) -> Path:
    answer = site.http.get(f"/pages/runs/{run.id}/file").raise_for_status()
    assert answer.headers["content-disposition"] == f'attachment; filename="{run.id}.html"'
    file = folder / "run.html"
    file.write_bytes(answer.content)
    return file


def traces_of(page: Page) -> dict[str, list[object]]:
    """Return name, length and last value of each drawn curve, by figure."""
    found: dict[str, list[object]] = (
        page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("[data-figure].js-plotly-plot")].map(
        (each) => [each.dataset.figure, each.data.map((trace) => [trace.name, trace.x?.length, trace.y?.at(-1)])]))""")
    )
    return found


def test_file_shows_the_plots_of_the_page_without_a_network(
    visit: Visit, window: BrowserContext, site: Site, tmp_path: Path
) -> None:
    file = saved(site, site.replayed, tmp_path)
    assert file.stat().st_size < LARGEST_BYTES
    on_page = traces_of(visit.open(site.url, site.replayed.address, unfold=True))
    visit.assert_clean()
    window.set_offline(True)
    try:
        page = visit.open(file.as_uri(), "", unfold=True)
        in_file = traces_of(page)
        assert page.locator("#semantics .why, #semantics .alert").count()
        assert page.locator("#probes table").count() == 1
    finally:
        window.set_offline(False)
    assert set(in_file) == set(on_page) - {each for each in on_page if "scalars.json" in each}
    assert {name: on_page[name] for name in in_file} == in_file
    assert len(in_file) == len(RUN_PLOTS)
    visit.assert_clean()


def test_controls_of_the_file_work(visit: Visit, site: Site, tmp_path: Path) -> None:
    page = visit.open(saved(site, site.run, tmp_path).as_uri(), "")
    page.get_by_label("Over", exact=True).select_option("time")
    page.get_by_label("Smooth", exact=True).select_option("5")
    overview = page.locator("[data-figure*=overview]")
    page.wait_for_function(
        "element => element.data.some((trace) => trace.opacity === 0.35)", arg=overview.element_handle()
    )
    page.locator("[data-theme-button]").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG of The run").click()
    assert download.value.suggested_filename.endswith(".png")
    visit.assert_clean()


def test_links_lead_to_the_service_and_nothing_can_be_sent(site: Site, tmp_path: Path) -> None:
    text = saved(site, site.run, tmp_path).read_text()
    links = set(re.findall(r'(?:href|data-steps)="([^"]*)"', re.sub(r"<script.*?</script>", "", text, flags=re.S)))
    assert f"{site.url}{site.run.address}" in links
    assert {each for each in links if not each.startswith((f"{site.url}/", "#"))} == set()
    assert "<form method" not in text
    assert not re.search(r'(?:src|<link[^>]*href)="', re.sub(r"<script.*?</script>", "", text, flags=re.S))


def test_names_of_a_run_are_text_in_its_file(visit: Visit, site: Site, tmp_path: Path) -> None:
    page = visit.open(saved(site, site.hostile, tmp_path).as_uri(), "", unfold=True)
    assert page.evaluate("window.hacked") is None
    assert page.locator("h1").inner_text() == site.hostile.name
    visit.assert_clean()


def test_modules_of_the_page_become_one_script() -> None:
    assert not re.search(r"^(import|export) ", bundled(), re.MULTILINE)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_file_of_a_protected_service_needs_a_key(http: httpx.Client, app: FastAPI, own_run: SentRun) -> None:
    key, headers = make_key(app.state.context.database, Scope.READ)
    assert http.get(f"/pages/runs/{own_run.id}/file").status_code == 401
    page = http.get(f"/pages/runs/{own_run.id}/file", headers=headers).raise_for_status().text
    assert "my own run" in page
    assert key not in page
