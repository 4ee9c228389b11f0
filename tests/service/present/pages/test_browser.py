"""The pages in a real Chromium: plots are drawn, nothing is refused by the policy, and a hostile name does nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

from service.present.pages.presenters.figures import RUN_PLOTS
from tests.service.present.pages.conftest import Site, replay, send_run

pytestmark = pytest.mark.slow

PATIENCE_MS = 240_000
MISSING = "Chromium is missing: apt-get install chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
# What the browser itself keeps of every breach of the page's policy.
RECORD_BREACHES = """
window.breaches = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.breaches.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The machine's own Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[BrowserContext]:
    """One window for all visits: the browser keeps what it has loaded and compiled."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    # Plotly is 5 MB of script; on a busy machine that takes its time.
    context.set_default_timeout(PATIENCE_MS)
    context.set_default_navigation_timeout(PATIENCE_MS)
    yield context
    context.close()


class Visit:
    """A page with what went wrong on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        self._asked: set[Request] = set()
        self.origin = ""
        self._left: set[Request] = set()
        page.add_init_script(RECORD_BREACHES)
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        # A page that is left while it refreshes itself gives up what it asked for.
        page.on("requestfailed", lambda r: self._note(r not in self._left, f"{r.failure}: {r.url}"))
        # Playwright marks the functions that it is given, which a built-in method does not let it.
        page.on("request", lambda request: self._asked.add(request))
        page.on("request", lambda request: self._note(not request.url.startswith(self.origin), f"left: {request.url}"))

    def _note(self, wrong: bool, words: str) -> None:
        if wrong:
            self.faults.append(words)

    def open(self, site_url: str, path: str) -> Page:
        """Load the page and wait until its figures are drawn."""
        self.origin = site_url
        self.go(site_url + path)
        self.page.wait_for_selector("body[data-drawn=yes]")
        return self.page

    def go(self, address: str) -> None:
        """Leave the page for another one."""
        self._left = set(self._asked)
        self.page.goto(address)

    def assert_clean(self) -> None:
        assert self.page.evaluate("window.breaches") == []
        assert self.faults == []


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def visit(window: BrowserContext) -> Iterator[Visit]:
    """A visit with a wide screen."""
    page = window.new_page()
    yield Visit(page)
    page.close()


def drawn_traces(page: Page, plot: str) -> int:
    """Return the number of traces of a figure that have a mark in its SVG."""
    plot_area = page.locator(f'[data-figure$="/{plot}.json"] svg.main-svg').first
    return plot_area.locator("g.trace").count()


def test_every_plot_of_a_run_is_drawn(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address)
    for name in RUN_PLOTS:
        figure = page.locator(f'[data-figure$="/{name}.json"]')
        if name == "attribution":
            assert "Nothing has been replayed yet" in figure.inner_text()
        else:
            assert figure.locator("svg.main-svg").count() >= 1, name
            assert drawn_traces(page, name) >= 1, name
    visit.assert_clean()


def test_the_waterfall_of_a_replayed_run_is_drawn(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.replayed.address)
    assert drawn_traces(page, "attribution") >= 1
    assert page.locator('[data-figure$="/attribution.json"] svg.main-svg g.bars path').count() == 3
    assert "engine against trainer numerics" in page.locator('[data-figure$="/attribution.json"]').inner_text()
    assert page.get_by_role("region", name="Probes").get_by_text("done").count() == 1
    visit.assert_clean()


def test_the_curve_of_the_mismatch_has_a_point_for_every_step(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address)
    points = page.locator('[data-figure$="/mismatch.json"] svg.main-svg g.trace path.point')
    assert points.count() == 12
    assert page.locator('[data-figure$="/mismatch.json"]').evaluate("e => e._fullLayout.yaxis.type") == "log"


def test_plots_have_a_label_for_screen_readers(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address)
    label = page.locator('[role=img][data-figure$="/mismatch.json"]').get_attribute("aria-label")
    assert re.match(r"Mismatch per token \(k3\)\. trainer/rollout: [\d.]+e-5 at step 12, between", str(label))
    caption = page.locator('section:has([data-figure$="/mismatch.json"]) figcaption')
    assert "healthy" not in caption.inner_text()
    assert "warning > 1e-3" in caption.inner_text()
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("navigation", name="Main").count() == 1


def test_plots_use_the_colours_of_the_theme(visit: Visit, site: Site, scheme: str) -> None:
    visit.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page = visit.open(site.url, site.run.address)
    wanted = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--series-1').trim()")
    used = page.locator('[data-figure$="/mismatch.json"]').evaluate("e => e.data[0].line.color")
    assert used == wanted == ("#5aa9ff" if scheme == "dark" else "#0b66c2")
    assert "var(" not in page.locator('[data-figure$="/mismatch.json"]').inner_html()
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.wait_for_function(
        "old => document.querySelector('[data-figure$=\"/mismatch.json\"]').data[0].line.color !== old", arg=used
    )
    visit.assert_clean()


@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_wider_than_the_screen(visit: Visit, site: Site, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 800})
    for path in ("/", site.run.address, f"{site.run.address}/steps/5", site.hostile.address, "/service"):
        page = visit.open(site.url, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    visit.go(f"{site.url}/login")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.assert_clean()


def test_a_step_fetches_its_worst_tokens(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, f"{site.run.address}/steps/5")
    assert page.get_by_role("region", name="Worst tokens").locator("tbody tr").count() == 20
    assert drawn_traces(page, "buckets") == 3
    visit.assert_clean()


def test_the_condition_of_the_buckets_is_selected(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, f"{site.run.address}/steps/5")
    card = page.locator("section:has(select[data-chooser])")
    card.get_by_label("Show it by").select_option("position in the response")
    card.get_by_role("heading", name="Mismatch by position in the response").wait_for()
    assert drawn_traces(page, "buckets-position") == 3
    card.get_by_label("Show it by").select_option("lag of the weights")
    card.get_by_text("weights_version").wait_for()
    card.get_by_label("Show it by").select_option("token id")
    card.get_by_role("heading", name="Mismatch by token id").wait_for()
    assert drawn_traces(page, "buckets-token-id") == 2
    visit.assert_clean()


def test_markup_in_a_name_is_not_executed(visit: Visit, site: Site) -> None:
    for path in ("/", site.hostile.address, f"{site.hostile.address}/steps/1"):
        page = visit.open(site.url, path)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert site.hostile.name in page.locator("body").inner_text()
    visit.assert_clean()


def test_policy_blocks_an_inline_script(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address)
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", '<img src=x onerror="window.hacked = 2">');
        }"""
    )
    page.wait_for_function("() => window.breaches.length >= 2")
    assert page.evaluate("window.hacked") is None


def test_page_of_a_running_run_refreshes_itself(visit: Visit, site: Site) -> None:
    run = send_run(site.http, "live", "a live run", steps=2)
    page = visit.open(site.url, run.address)
    page.evaluate("window.still = 'the same page'")
    send_run(site.http, "live", "a live run", steps=3)
    page.wait_for_function("() => document.querySelector('[data-part=tiles]').innerText.includes('newest step 3')")
    plot = '[data-figure$="/mismatch.json"]'
    page.wait_for_function(f"() => document.querySelector('{plot}').data[0].x.length === 3")
    assert page.evaluate("window.still") == "the same page"
    site.http.patch(f"/v1/runs/{run.id}", json={"state": "finished"}).raise_for_status()
    page.wait_for_function("() => document.querySelector('#freshness').textContent.includes('ended')")
    visit.assert_clean()


def test_open_details_stay_open_during_a_refresh(visit: Visit, site: Site) -> None:
    run = send_run(site.http, "opened", "an opened run", steps=1)
    page = visit.open(site.url, f"{run.address}/steps/1")
    page.locator("summary", has_text="Distribution and tails of d").click()
    # The part that holds the focus is left alone: the reader goes on to something else.
    page.evaluate("document.activeElement.blur()")
    replay(site.http, run, step=1)
    page.wait_for_function("() => document.querySelector('[data-part=numbers]').innerText.includes('vllm.prefill')")
    opened = page.locator("details[open] > summary")
    assert opened.all_inner_texts() == ["Distribution and tails of d"]
    assert page.get_by_role("region", name="Distribution and tails of d").is_visible()
    # What was fetched after the page is fetched again with it.
    page.get_by_role("region", name="Worst tokens").get_by_role("columnheader", name="vllm.prefill").first.wait_for()
    visit.assert_clean()


def test_an_operators_form_works_without_a_script(browser: Browser, site: Site) -> None:
    run = send_run(site.http, "operated", "an operated run", steps=1)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(site.url + run.address)
    page.get_by_role("button", name="Hold").click()
    assert page.url == site.url + run.address
    assert "held by an operator" in page.locator("[data-part=advice]").inner_text()
    context.close()
