"""The pages in a real Chromium: plots are drawn, nothing is refused by the policy, and a hostile name does nothing."""

import re

import pytest
from playwright.sync_api import Browser, Page

from foreshock_service.present.pages.presenters.figures import RUN_PLOTS
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import Site, replay, send_run

pytestmark = pytest.mark.slow


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def drawn_traces(page: Page, plot: str) -> int:
    plot_area = page.locator(f'[data-figure$="/{plot}.json"] svg.main-svg').first
    return plot_area.locator("g.trace").count()


def test_every_plot_of_a_run_is_drawn(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    for name in RUN_PLOTS:
        figure = page.locator(f'[data-figure$="/{name}.json"]')
        if name == "attribution":
            assert "Nothing has been replayed yet" in figure.inner_text()
        else:
            assert figure.locator("svg.main-svg").count() >= 1, name
            assert drawn_traces(page, name) >= 1, name
    visit.assert_clean()


def test_plots_have_a_label_for_screen_readers(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    label = page.locator('[role=img][data-figure$="/mismatch.json"]').get_attribute("aria-label")
    assert re.match(r"Mismatch per token \(k3\)\. trainer/rollout: [\d.]+e-5 at step 12, between", str(label))
    caption = page.locator('figure:has([data-figure$="/mismatch.json"]) figcaption')
    caption.locator("summary").click()
    assert "healthy" not in caption.inner_text()
    assert "warning > 1e-3" in caption.inner_text()
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("navigation", name="Main").count() == 1


def test_plots_use_the_colours_of_the_theme(visit: Visit, site: Site, scheme: str) -> None:
    visit.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page = visit.open(site.url, site.run.address)
    used = page.locator('[data-figure$="/overview.json"]').evaluate("e => e.data[0].line.color")
    assert used == ("rgb(90, 169, 255)" if scheme == "dark" else "rgb(11, 102, 194)")
    assert "var(" not in page.locator('[data-figure$="/overview.json"]').inner_html()
    changed = "old => document.querySelector('[data-figure$=\"/overview.json\"]').data[0].line.color !== old"
    page.get_by_role("button", name="Light or dark").click()
    page.wait_for_function(changed, arg=used)
    assert page.reload() is not None
    page.wait_for_selector("body[data-drawn=yes]")
    assert page.evaluate("document.documentElement.dataset.theme") == ("light" if scheme == "dark" else "dark")
    page.evaluate("localStorage.clear()")
    visit.assert_clean()


@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_wider_than_the_screen(visit: Visit, site: Site, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 800})
    for path in ("/", site.run.address, f"{site.run.address}/steps/5", site.hostile.address):
        page = visit.open(site.url, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    visit.go(f"{site.url}/login")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
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
    page = visit.open_live(site.url, run.address, seconds=5)
    page.evaluate("window.still = 'the same page'")
    send_run(site.http, "live", "a live run", steps=3)
    page.wait_for_function("() => /step\\s*3/.test(document.querySelector('[data-part=head]').innerText)")
    plot = '[data-figure$="/overview.json"]'
    page.wait_for_function(f"() => document.querySelector('{plot}').data[0].x.length === 3")
    assert page.evaluate("window.still") == "the same page"
    site.http.patch(f"/v1/runs/{run.id}", json={"state": "finished"}).raise_for_status()
    page.wait_for_function("() => document.querySelector('#freshness').textContent.includes('ended')")
    visit.assert_clean()


def test_open_details_stay_open_during_a_refresh(visit: Visit, site: Site) -> None:
    run = send_run(site.http, "opened", "an opened run", steps=1)
    page = visit.open_live(site.url, f"{run.address}/steps/1", seconds=10)
    page.locator("#measures > summary").click()
    page.locator("summary", has_text="Distribution and tails of d").click()
    # The part that holds the focus is left alone: the reader goes on to something else.
    page.evaluate("document.activeElement.blur()")
    replay(site.http, run, step=1)
    page.wait_for_function("() => document.querySelector('[data-part=numbers]').innerText.includes('vllm.prefill')")
    opened = page.locator("details[open] > summary")
    assert opened.all_inner_texts() == ["Measures", "Distribution and tails of d"]
    assert page.get_by_role("region", name="Distribution and tails of d").is_visible()
    # What was fetched after the page is fetched again with it.
    page.get_by_role("region", name="Worst tokens").get_by_role("columnheader", name="vllm.prefill").first.wait_for()
    visit.assert_clean()


def test_an_operators_form_works_without_a_script(browser: Browser, site: Site) -> None:
    run = send_run(site.http, "operated", "an operated run", steps=1)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(site.url + run.address)
    page.locator("summary").get_by_text("Hold", exact=True).click()
    page.get_by_label("Reason").first.fill("a test")
    page.get_by_role("button", name="Hold: yes").click()
    assert page.url == site.url + run.address
    assert "held until it is released" in page.locator("[data-part=advice]").inner_text()
    context.close()
