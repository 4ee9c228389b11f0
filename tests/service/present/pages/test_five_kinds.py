"""Five kinds of run are shown right, also before any script runs: the verdict of the first screen."""

from __future__ import annotations

import html
import re
import statistics

import pytest
from playwright.sync_api import Browser

from foreshock.healthy_ranges import required_range
from tests.service.present.pages.conftest import Fleet
from tests.service.present.pages.fleet import KINDS, SILENT_FROM, SILENT_RANK

HEALTHY = r"Healthy: the mismatch \(k3\) is \S+ in the newest 10 measured steps; the reward, 0\.\d+, is near its best\."
VERDICTS = {
    "learning": HEALTHY,
    "learning-rate": r"(Critical|Warning) since step \d+: .*the (smoothed )?reward (has fallen|fell)",
    "mismatch": r"(Critical|Warning) since step \d+: .*",
    "experts": HEALTHY,
    "incomplete": rf"Warning since step {SILENT_FROM}: rank {SILENT_RANK} sent nothing in \d+ steps, ",
}


def verdict_in(page: str) -> str:
    found = re.search(r'class="verdict [a-z]*"><p><strong>(.*?)</strong>', page, re.S)
    assert found is not None
    return html.unescape(found[1])


def test_first_answer_has_the_verdict_that_the_api_gives(fleet: Fleet) -> None:
    for name in KINDS:
        verdict = verdict_in(fleet.http.get(fleet.address(name)).raise_for_status().text)
        assert re.match(VERDICTS[name], verdict)
        assert verdict == fleet.get(name, "diagnosis")["headline"]


def test_mixture_of_experts_is_judged_by_its_own_range(fleet: Fleet) -> None:
    page = fleet.http.get(fleet.address("experts")).text
    overview = fleet.http.get(f"/pages/runs/{fleet.ids['experts']}/figures/overview.json").json()
    k3 = statistics.median(list(fleet.measured("experts", "trainer/rollout", "k3_kl").values())[-10:])
    dense, experts = required_range("k3_kl", "dense"), required_range("k3_kl", "moe")
    assert (dense.verdict(k3), experts.verdict(k3)) == ("warning", "healthy")
    assert f"{experts.healthy} is healthy" in overview["caption"]
    assert "No open alert" in page


def test_list_marks_what_is_ill_and_nothing_else(fleet: Fleet) -> None:
    page = fleet.http.get("/").raise_for_status().text
    rows = {name: re.search(rf'aria-label="Compare {name}".*?</tr>', page, re.S) for name in KINDS}
    texts = {name: found[0] for name, found in rows.items() if found is not None}
    for name, text in texts.items():
        assert fleet.get(name, "diagnosis")["headline"] in html.unescape(text)
    assert "steps incomplete" in texts["incomplete"]
    for name in ("learning", "experts"):
        assert 'class="dot healthy' in texts[name]


@pytest.mark.slow
def test_verdict_is_on_the_first_screen_without_javascript(fleet: Fleet, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 844})
    page = context.new_page()
    for name in KINDS:
        page.goto(fleet.url + fleet.address(name))
        verdict = page.locator(".verdict strong")
        box = verdict.bounding_box()
        assert re.match(VERDICTS[name], verdict.inner_text())
        assert box is not None
        assert box["y"] + box["height"] < 844
    context.close()
