"""Ten questions of a newcomer about a run, each answered on the pages in at most two clicks and checked by the API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator, Page

from tests.service.present.pages.conftest import Fleet

MOST_CLICKS = 2
_TOLERANCE = 6e-3
"""Three digits are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the page says, what is right, and the clicks that it took."""

    given: Any
    expected: Any
    clicks: int = 0

    @property
    def is_right(self) -> bool:
        """Return whether the answer is right; numbers may be rounded to three digits."""
        if isinstance(self.expected, float) and isinstance(self.given, float):
            return abs(self.given - self.expected) <= _TOLERANCE * abs(self.expected)
        return bool(self.given == self.expected)


def opened(page: Page, fleet: Fleet, name: str) -> Page:
    """Open the page of a run and wait until it is drawn."""
    page.goto(fleet.url + fleet.address(name))
    page.wait_for_selector("body[data-drawn=yes]")
    return page


def _follow(link: Locator) -> Page:
    """Click a link, and wait until the page that it leads to is drawn."""
    page = link.page
    with page.expect_navigation():
        link.click()
    page.wait_for_selector("body[data-drawn=yes]")
    return page


def _to_newest_step(page: Page) -> Page:
    return _follow(page.locator("[data-part=head] a[href*='/steps/']"))


def _newest(fleet: Fleet, name: str) -> int:
    return int(fleet.http.get(f"/v1/runs/{fleet.ids[name]}").raise_for_status().json()["last_step"])


def _number(text: str) -> float:
    return float(text.replace("−", "-"))


def _is_healthy(page: Page, fleet: Fleet, name: str) -> Answer:
    opened(page, fleet, name)
    return Answer(page.locator(".verdict").inner_text().startswith("Healthy"), name in ("learning", "experts"))


def _since(page: Page, fleet: Fleet, name: str) -> Answer:
    found = re.search(r"since step (\d+)", opened(page, fleet, name).locator(".verdict").inner_text())
    return Answer(None if found is None else int(found[1]), fleet.get(name, "diagnosis")["since"])


def _what_to_do(page: Page, fleet: Fleet, name: str) -> Answer:
    shown = opened(page, fleet, name).locator(".judged section", has_text="What to do").locator("p").first
    steps = fleet.get(name, "diagnosis")["next_steps"]
    plain = steps[0].replace("`", "") if steps else ""
    return Answer(shown.inner_text() if shown.count() else "", plain)


def _newest_of(panel: str, comparison: str, measure: str) -> Callable[[Page, Fleet, str], Answer]:
    def ask(page: Page, fleet: Fleet, name: str) -> Answer:
        texts = opened(page, fleet, name).locator("[data-figure$='/overview.json'] .annotation").all_text_contents()
        found = next((text for text in texts if text.startswith(panel) and "at lag 0" not in text), "")
        values = fleet.measured(name, comparison, measure)
        return Answer(_number(found.rpartition(" ")[2]), values[max(values)])

    return ask


def _alerts(page: Page, fleet: Fleet, name: str) -> Answer:
    title = opened(page, fleet, name).locator("#alerts-title").inner_text()
    found = re.match(r"(\d+|No)", title)
    standing = [
        each for each in fleet.get(name, "alerts", limit=200)["items"] if each["state"] in ("open", "acknowledged")
    ]
    return Answer(found and found[1].replace("No", "0"), str(len(standing)))


def _rate(page: Page, fleet: Fleet, name: str) -> Answer:
    card = opened(page, fleet, name).locator("#advice")
    advice = fleet.get(name, "lr-advice")
    shadow = "shadow" in card.locator(".badge").first.inner_text()
    given = (_number(card.locator(".scale").inner_text().removeprefix("×").strip()), shadow)
    return Answer(given, (round(advice["advised_scale"], 3), advice["mode"] == "shadow"))


def _worst_token(page: Page, fleet: Fleet, name: str) -> Answer:
    step = _newest(fleet, name)
    row = _to_newest_step(opened(page, fleet, name)).locator("[aria-labelledby=tokens-title] tbody tr").first
    found = [row.locator("th").inner_text(), int(row.locator("[data-column=Position]").inner_text())]
    (worst,) = fleet.get(name, f"steps/{step}/tokens", worst=1)["items"]
    return Answer(found, [worst["sample_id"], worst["position"]], 1)


def _worst_rollout(page: Page, fleet: Fleet, name: str) -> Answer:
    step = _newest(fleet, name)
    row = _to_newest_step(opened(page, fleet, name)).locator("[aria-labelledby=tokens-title] tbody tr").first
    headline = _follow(row.get_by_role("link")).locator(".verdict").inner_text()
    (worst,) = fleet.get(name, f"steps/{step}/tokens", worst=1)["items"]
    found = re.search(r"at position (\d+)", headline)
    return Answer(found and int(found[1]), worst["position"], 2)


def _what_changed(page: Page, fleet: Fleet, name: str) -> Answer:
    lengths = fleet.measured(name, "rollout", "response_length_mean")
    before, now = sorted(lengths)[-2:]
    part = _to_newest_step(opened(page, fleet, name)).locator("#changed")
    clicks = 1
    if part.get_attribute("open") is None:
        part.locator("summary").click()
        clicks = 2
    row = part.locator("tr", has_text="response length mean").locator("td").all_inner_texts()
    close = [
        abs(_number(text) - lengths[at]) <= _TOLERANCE * lengths[at]
        for text, at in zip(row, (before, now), strict=True)
    ]
    return Answer(close, [True, True], clicks)


QUESTIONS: Mapping[str, Callable[[Page, Fleet, str], Answer]] = {
    "Is the run healthy?": _is_healthy,
    "Since which step is it not?": _since,
    "What should I do?": _what_to_do,
    "How large is the reward now?": _newest_of("Reward", "rollout", "reward_mean"),
    "How large is the mismatch now?": _newest_of("Mismatch, k3", "trainer/rollout", "k3_kl"),
    "How many alerts stand?": _alerts,
    "Which learning rate is advised, and does the trainer get it?": _rate,
    "Which token differs most at the newest step?": _worst_token,
    "Where in its rollout is it?": _worst_rollout,
    "What changed since the step before?": _what_changed,
}
