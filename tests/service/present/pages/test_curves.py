"""Curves in Chromium: one x axis and one zoom for all, kept in the address; a point opens its step; plots are saved."""

import csv
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page

from foreshock_service.present.pages.figures import Curve
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import STEPS, Site, send_run

MISMATCH = '[data-figure$="/mismatch.json"]'
LENGTH = '[data-figure$="/length.json"]'
pytestmark = pytest.mark.slow


def range_of(page: Page, figure: str) -> list[float]:
    found: list[float] = page.locator(figure).evaluate("e => e._fullLayout.xaxis.range")
    return found


def zoom(page: Page, low: float, high: float) -> None:
    """Zoom the plot of the mismatch as a drag does, and wait until the other plots have followed."""
    page.evaluate(f"""Plotly.relayout(document.querySelector('{MISMATCH}'),
        {{"xaxis.range[0]": {low}, "xaxis.range[1]": {high}}})""")
    page.wait_for_function(
        f"() => Math.abs(document.querySelector('{LENGTH}')._fullLayout.xaxis.range[0] - {low}) < 1e-6"
    )


def test_zoom_moves_all_curves_and_survives_a_reload(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    zoom(page, 3, 7.5)
    assert range_of(page, LENGTH) == [3, 7.5]
    assert "from=3" in page.url
    assert "to=7.5" in page.url
    page = visit.open(site.url, page.url.removeprefix(site.url), unfold=True)
    assert range_of(page, MISMATCH) == range_of(page, LENGTH) == [3, 7.5]
    page.get_by_role("button", name="Whole run").click()
    page.wait_for_function(f"() => document.querySelector('{LENGTH}')._fullLayout.xaxis.range[1] >= {STEPS}")
    assert "from=" not in page.url
    visit.assert_clean()


def test_zoom_survives_the_refresh_of_a_live_run(visit: Visit, site: Site) -> None:
    send_run(site.http, "zoomed", steps=4)
    page = visit.open_live(site.url, "/runs/default/zoomed", seconds=5)
    visit.unfold()
    zoom(page, 1.5, 3.5)
    send_run(site.http, "zoomed", steps=5)
    page.wait_for_function(f"() => document.querySelector('{MISMATCH}').data[0].x.length === 5")
    assert range_of(page, MISMATCH) == [1.5, 3.5]


def test_axis_smoothing_and_scale_are_chosen_and_kept_in_the_address(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    page.locator("#curves").get_by_label("Over").select_option("over hours")
    page.wait_for_function(
        f"() => document.querySelector('{MISMATCH}')._fullLayout.xaxis.title.text.startsWith('hours')"
    )
    first, last = page.locator(MISMATCH).evaluate("e => [e.data[0].x[0], e.data[0].x.at(-1)]")
    assert first == 0
    assert 0 < last < 1, "the steps arrived within seconds"
    page.get_by_label("log scale").check()
    page.wait_for_function(f"() => document.querySelector('{LENGTH}')._fullLayout.yaxis.type === 'log'")
    page.locator("#curves").get_by_label("Smooth").select_option("5 points")
    page.wait_for_function(f"() => document.querySelector('{MISMATCH}').data.length === 2")
    assert "x=time" in page.url
    assert "smooth=5" in page.url
    assert "log=1" in page.url
    page = visit.open(site.url, page.url.removeprefix(site.url), unfold=True)
    assert page.locator(LENGTH).evaluate("e => e._fullLayout.yaxis.type") == "log"
    assert page.locator("#curves").get_by_label("Over").input_value() == "time"
    visit.assert_clean()


def test_axis_that_is_not_logged_leaves_the_curves_over_steps(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, f"{site.run.address}?x=lr", unfold=True)
    assert page.locator("#curves").get_by_label("Over").input_value() == "step"
    assert page.locator(MISMATCH).evaluate("e => e.data[0].x[0]") == 1


def test_pointing_at_a_step_shows_its_values_in_all_curves_in_view(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    page.set_viewport_size({"width": 1280, "height": 6000})
    point = page.locator(f"{MISMATCH} g.trace path.point").nth(4)
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    for labels in (f"{MISMATCH} .hoverlayer > g", f"{LENGTH} .hoverlayer .hovertext"):
        page.wait_for_function(f"() => document.querySelectorAll('{labels}').length > 0")
    panels = page.locator(f"{LENGTH} .hoverlayer .hovertext")
    assert panels.count() == 4, "the mean, the median, the 90th percentile, the longest"
    page.mouse.move(2, 2)
    page.wait_for_function(f"() => document.querySelectorAll('{LENGTH} .hovertext').length === 0")
    visit.assert_clean()


def test_scalars_are_filtered_by_name(visit: Visit, site: Site) -> None:
    run = send_run(site.http, "scalars", steps=2)
    values = {f"<b>group {number % 3}<b>/loss {number}": float(number) for number in range(30)}
    for step in (1, 2):
        site.http.put(f"/v1/runs/{run.id}/steps/{step}/scalars", json={"values": values}).raise_for_status()
    page = visit.open(site.url, run.address)
    part = page.locator("#scalars")
    part.locator("> summary").click()
    part.get_by_text("31 of 31 scalars").wait_for()
    assert part.locator(".group").all_inner_texts() == [*(f"<b>group {n}<b>" for n in range(3)), "without a group"]
    part.get_by_label("Filter").fill("LOSS 13")
    part.get_by_text(re.compile("^1 of 31 scalars")).wait_for()
    page.wait_for_function("() => document.querySelectorAll('#scalars g.trace').length === 1")
    assert "<b>group 1<b>/loss 13, newest 13" in str(part.locator(".annotation").text_content())
    assert part.get_by_label("Filter").evaluate("each => each === document.activeElement")
    visit.assert_clean()


def test_click_on_a_point_opens_its_step(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    point = page.locator(f"{MISMATCH} g.trace path.point").nth(4)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url(f"**{site.run.address}/steps/5")


def test_plot_and_its_data_are_saved(visit: Visit, site: Site, tmp_path: Path) -> None:
    page = visit.open(site.url, site.run.address, unfold=True)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Data of Mismatch per token").click()
    assert saved.value.suggested_filename == "mismatch-per-token-k3.csv"
    saved.value.save_as(tmp_path / "data.csv")
    rows = list(csv.reader((tmp_path / "data.csv").read_text().splitlines()))
    assert rows[0] == ["training step", "trainer/rollout"]
    assert [row[0] for row in rows[1:]] == [str(step) for step in range(1, STEPS + 1)]
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG of Mismatch per token").click()
    saved.value.save_as(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "plot.png").stat().st_size > 5_000
    visit.assert_clean()


def test_axes_have_time_of_every_step_and_the_sum_of_learning_rates(site: Site) -> None:
    run = send_run(site.http, "rated", steps=3)
    assert "lr" not in site.http.get(f"/pages/runs/{run.id}/axes.json").json()
    for step, rate in ((1, 0.5), (2, 0.25), (3, 0.25)):
        values = {"values": {"lr": rate}}
        site.http.put(f"/v1/runs/{run.id}/steps/{step}/scalars", json=values).raise_for_status()
    axes = site.http.get(f"/pages/runs/{run.id}/axes.json").json()
    assert axes["lr"] == {"steps": [1, 2, 3], "values": [0.5, 0.75, 1.0]}
    assert axes["time"]["steps"] == [1, 2, 3]
    assert axes["time"]["values"][0] == 0
    assert Curve(axes["time"]["steps"], axes["time"]["values"]).points()[-1][1] >= 0
