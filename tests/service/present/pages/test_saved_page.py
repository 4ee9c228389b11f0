"""The page of a run as one file: opened from disk without a network, it shows what the service's page shows."""

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import BrowserContext, Page

from foreshock.api.diagnosis import Diagnosis, DiagnosisEvent
from foreshock.commands.text import WIDTH
from foreshock_service.platform.security import Scope
from foreshock_service.present.pages.presenters import report
from foreshock_service.present.pages.presenters.figures import RUN_PLOTS
from foreshock_service.present.pages.presenters.report import SCREEN_LINES
from tests.service.keys import make_key
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import STEPS, Fleet, SentRun, Site
from tests.service.present.pages.fleet import KINDS
from tests.service.sending import problem_of

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


def test_file_shows_the_plots_of_the_page_offline(
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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_file_of_a_protected_service_needs_a_key(http: httpx.Client, app: FastAPI, own_run: SentRun) -> None:
    key, headers = make_key(app.state.context.database, Scope.READ)
    assert http.get(f"/pages/runs/{own_run.id}/file").status_code == 401
    page = http.get(f"/pages/runs/{own_run.id}/file", headers=headers).raise_for_status().text
    assert "my own run" in page
    assert key not in page


def lines_of(site: Site | Fleet, run_id: str, **query: object) -> list[str]:
    answer = site.http.get(f"/pages/runs/{run_id}/text", params={name: str(value) for name, value in query.items()})
    assert answer.raise_for_status().headers["content-type"] == "text/plain; charset=utf-8"
    return answer.text.splitlines()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("query", [{}, {"whole": "true"}])
def test_report_of_each_run_says_its_diagnosis_in_its_width(fleet: Fleet, name: str, query: dict[str, object]) -> None:
    found = fleet.get(name, "diagnosis")
    lines = lines_of(fleet, fleet.ids[name], **query)
    assert found["headline"] in lines
    assert not [line for line in lines if "None" in line]
    assert not [line for line in lines if len(line) > WIDTH + 30 and line != found["headline"]]
    assert lines[-1] == f"Pages: {fleet.url}{fleet.address(name)}"
    assert query or len(lines) <= SCREEN_LINES


def test_whole_report_has_every_figure_of_the_page(site: Site) -> None:
    text = "\n".join(lines_of(site, site.replayed.id, whole="true"))
    titles = (
        "Mismatch per token (k3)", "Response length", "Learning-rate scale", "Where the mismatch comes from, step 3",
        "Mismatch by token probability", "Alerts",
    )  # fmt: skip
    for title in titles:
        assert f"\n{title} ─" in text
    assert "Tails and effective sample size ─" in text
    for link in ("vllm.prefill/rollout", "torch.trainer/vllm.prefill", "trainer/torch.trainer", "trainer/rollout"):
        assert f"\n  {link} " in text
    page = site.http.get(f"/pages/runs/{site.replayed.id}/figures/length.json").json()
    assert page["summary"].split(".")[0] in " ".join(text.split())


def test_report_of_a_step_has_its_measures_and_buckets(site: Site) -> None:
    lines = lines_of(site, site.run.id, step=STEPS)
    text = "\n".join(lines)
    assert f"Measures of trainer/rollout, step {STEPS} ─" in text
    (k3,) = [line for line in lines if line.startswith("  k3_kl  ")]
    assert "range: " in k3
    assert "Nothing has been replayed yet." in text
    (header,) = [line for line in lines if "probability under rollout" in line and "tokens" in line]
    assert header.split()[-4:] == ["|d|", "largest", "|d|", "tokens"]
    assert lines[-1].endswith(f"/steps/{STEPS}")
    missing = site.http.get(f"/pages/runs/{site.run.id}/text", params={"step": STEPS + 1})
    assert problem_of(missing) == (404, "step-not-found")


def test_screen_counts_the_sentences_that_it_leaves_out() -> None:
    event = DiagnosisEvent(
        step=7, onset=5, rule="mismatch_rise", severity="critical", sentence="Step 7: k3 rose.", is_open=True
    )
    found = Diagnosis(verdict="critical", since=7, headline="Critical since step 7.", events=(event,) * 5)
    for most in (1, 3):
        lines = report._diagnosis(found, most)
        assert lines[0] == found.headline
        assert lines.count("    · Step 7: k3 rose.") == most
        assert lines[-1].strip() == f"and {5 - most} more"


def test_report_counts_the_logged_steps_without_the_advised_rate(site: Site) -> None:
    (counted,) = (line for line in lines_of(site, site.run.id) if " rollouts, " in line)
    assert counted.startswith(f"  {STEPS} steps (1 to {STEPS}), ")
