"""Every page on phones and on wide screens, light and dark: nothing is cut, found by axe-core, or out of reach."""

import html
import re
import statistics
from collections.abc import Callable
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page

from foreshock.healthy_ranges import required_range
from tests.service.present.pages.browsing import COLOUR_RULES, Visit, serious
from tests.service.present.pages.conftest import Fleet
from tests.service.present.pages.fleet import KINDS, REPLAYED_STEP, SILENT_FROM, SILENT_RANK

pytestmark = pytest.mark.slow
SIZES = {390: 844, 768: 1024, 1440: 900, 2560: 1440}
# Each with the rules of axe-core that are looked at; () for all.
SCHEMES: dict[Literal["light", "dark"], tuple[str, ...]] = {"light": (), "dark": COLOUR_RULES}
MOST_SCREENS = {390: 5.0, 1440: 3.0}
MOST_WORDS = 120
STEP = f"/runs/default/mismatch/steps/{REPLAYED_STEP}"
PAGES: dict[str, Callable[[Fleet], str]] = {
    "runs": lambda fleet: "/",
    "run": lambda fleet: fleet.address("mismatch"),
    "step": lambda fleet: STEP,
    "rollout": lambda fleet: f"{STEP}/rollouts/{REPLAYED_STEP}-0-0",
    "alerts": lambda fleet: "/alerts",
    "certificates": lambda fleet: "/certificates",
    "certificate": lambda fleet: "/certificates/{}?against={}".format(*fleet.certificates),
    "compare": lambda fleet: f"/compare?run={fleet.ids['learning']}&run={fleet.ids['mismatch']}",
}
# Words that begin within the first screen; those of closed details and of screen readers are not seen.
COUNT_WORDS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let words = 0;
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement;
    if (!text.textContent.trim() || parent.closest(".visually-hidden, .skip, option, noscript, svg")) continue;
    if (!parent.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    if (box.height && box.top + scrollY < innerHeight) words += text.textContent.trim().split(/\\s+/).length;
  }
  return words;
}"""
CUT = """() => [...document.querySelectorAll("main *")]
  .filter((each) => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 1
    && getComputedStyle(each).overflowX !== "visible" && !each.matches("select, input"))
  .map((each) => `${each.tagName} ${each.className}: ${each.innerText?.slice(0, 80)}`)"""
MARK_ACTIONS = """() => {
  const found = [...document.querySelectorAll("a[href], button, select, input:not([type=hidden]), summary")]
    .filter((each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled);
  found.forEach((each, at) => { each.dataset.action = at; });
  return found.map((each) => each.innerText || each.name || each.getAttribute("aria-label") || each.tagName);
}"""
FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  return at === document.body ? null : [at.dataset.action ?? "", style.outlineStyle !== "none"];
}"""


def opened(visit: Visit, fleet: Fleet, address: str, width: int) -> Page:
    """Open a page at a width, and wait until it is drawn, if it has anything to draw."""
    visit.origin = fleet.url
    visit.page.set_viewport_size({"width": width, "height": SIZES[width]})
    visit.go(fleet.url + address)
    if visit.page.locator("script[type=module]").count():
        visit.page.wait_for_selector("body[data-drawn=yes]")
    return visit.page


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_at_every_width_in_light_and_dark(visit: Visit, fleet: Fleet, name: str) -> None:
    for width in SIZES:
        page = opened(visit, fleet, PAGES[name](fleet), width)
        for scheme, rules in SCHEMES.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, scheme)
            # From 1001 px on the style sheet has one layout.
            assert width > 1440 or serious(page, rules) == [], (width, scheme)
    visit.assert_clean()


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_on_a_wide_screen(visit: Visit, fleet: Fleet, name: str) -> None:
    page = opened(visit, fleet, PAGES[name](fleet), 2560)
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize(("name", "width"), [*((name, 390) for name in PAGES), ("run", 1440), ("step", 1440)])
def test_page_is_few_screens(visit: Visit, fleet: Fleet, name: str, width: int) -> None:
    page = opened(visit, fleet, PAGES[name](fleet), width)
    assert page.evaluate("document.documentElement.scrollHeight / innerHeight") < MOST_SCREENS[width]


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", KINDS)
def test_first_screen_of_a_run_has_few_words(visit: Visit, fleet: Fleet, name: str, width: int) -> None:
    page = opened(visit, fleet, fleet.address(name), width)
    assert page.evaluate(COUNT_WORDS) <= MOST_WORDS


@pytest.mark.parametrize(("name", "width"), [*((name, 1440) for name in PAGES), ("run", 390)])
def test_keyboard_reaches_every_action_and_shows_where_it_is(visit: Visit, fleet: Fleet, name: str, width: int) -> None:
    page = opened(visit, fleet, PAGES[name](fleet), width)
    actions = page.evaluate(MARK_ACTIONS)
    reached: set[str] = set()
    for _ in range(3 * len(actions) + 20):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUSED)
        if found is None:
            break
        action, is_outlined = found
        assert is_outlined or not action, actions[int(action)]
        reached.add(action)
    assert [text for at, text in enumerate(actions) if str(at) not in reached] == []


def test_folded_part_opens_by_keyboard_and_is_drawn(visit: Visit, fleet: Fleet) -> None:
    page = opened(visit, fleet, fleet.address("mismatch"), 390)
    summary = page.locator("#figure-length summary").first
    plot = page.locator('[data-figure$="/length.json"]')
    assert not plot.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    plot.locator("svg.main-svg").first.wait_for()
    visit.assert_clean()


HEALTHY = r"Healthy: the mismatch \(k3\) is \S+ in the newest 10 measured steps; the reward, 0\.\d+, is near its best\."
VERDICTS = {
    "learning": HEALTHY,
    "learning-rate": r"(Critical|Warning) since step \d+: .*the (smoothed )?reward (has fallen|fell)",
    "mismatch": r"(Critical|Warning) since step \d+: .*",
    "experts": HEALTHY,
    "incomplete": rf"Warning since step {SILENT_FROM}: rank {SILENT_RANK} sent nothing in \d+ steps, ",
}


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
