"""A page in Chromium with what went wrong on it, and what axe-core finds there."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Locator, Page, Request

PATIENCE_MS = 240_000
# What the browser itself keeps of every breach of the page's policy.
RECORD_BREACHES = """
window.breaches = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.breaches.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
"""
# Before the page's own script, a deferred module, reads how often a live page refreshes itself.
REFRESH_OFTEN = """
document.addEventListener("readystatechange", () => {
  if (document.readyState !== "interactive") return;
  window.shippedSeconds = document.body.dataset.refreshSeconds;
  document.body.dataset.refreshSeconds = "0.5";
});
"""


class Visit:
    """A page with what went wrong on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        self._asked: set[Request] = set()
        self.origin = ""
        self._left: set[Request] = set()
        self._leaving = False
        page.add_init_script(RECORD_BREACHES)
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("requestfailed", lambda r: self._note(not self._is_given_up(r), f"{r.failure}: {r.url}"))
        # Playwright marks the functions that it is given, which a built-in method does not let it.
        page.on("request", lambda request: self._asked.add(request))
        page.on("request", lambda request: self._note(self._leaves(request.url), f"left: {request.url}"))

    def _leaves(self, address: str) -> bool:
        """Return whether an address is of another origin; a blob is made by the page itself."""
        return not address.startswith(("blob:", self.origin))

    def _is_given_up(self, request: Request) -> bool:
        """Return whether a page asked for it that was left meanwhile: it may refresh itself at that moment."""
        return request in self._left or (self._leaving and request.failure == "net::ERR_ABORTED")

    def _note(self, wrong: bool, words: str) -> None:
        if wrong:
            self.faults.append(words)

    def open(self, site_url: str, path: str, *, unfold: bool = False) -> Page:
        """Load the page and wait until its figures are drawn; `unfold`: those of every part that opens, too."""
        self.origin = site_url
        self.go(site_url + path)
        self.page.wait_for_selector("body[data-drawn=yes]")
        if unfold:
            self.unfold()
        return self.page

    def unfold(self) -> None:
        """Open every part of the page, one after the other, as a reader does."""
        for part in self.page.locator("details.card:not([open])").element_handles():
            part.evaluate("part => { part.open = true; }")
            self.page.wait_for_timeout(50)
            self.page.wait_for_selector("body[data-drawn=yes]")

    def open_live(self, site_url: str, path: str, seconds: int) -> Page:
        """Open a page that refreshes itself every `seconds`; here it does so twice a second."""
        self.page.add_init_script(REFRESH_OFTEN)
        page = self.open(site_url, path)
        assert page.evaluate("window.shippedSeconds") == str(seconds)
        return page

    def go(self, address: str) -> None:
        """Leave the page for another one."""
        with self._being_left():
            self.page.goto(address)

    def follow(self, link: Locator) -> None:
        """Leave the page by a link of it; it may still ask for figures."""
        with self._being_left(), self.page.expect_navigation():
            link.click()

    @contextmanager
    def _being_left(self) -> Iterator[None]:
        self._left = set(self._asked)
        self._leaving = True
        yield
        self._leaving = False

    def assert_clean(self) -> None:
        assert self.page.evaluate("window.breaches") == []
        assert self.faults == [], self.faults


AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
# The rules of axe-core whose findings depend on the colour scheme.
COLOUR_RULES = ("color-contrast", "link-in-text-block")


def serious(page: Page, rules: Sequence[str] = ()) -> list[str]:
    """Return the findings of axe-core that are serious or critical, each with its first element; () for all rules."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found: dict[str, Any] = page.evaluate("options => axe.run(document, options)", options)
    return [
        f"{each['id']}: {json.dumps(each['nodes'][0]['target'])} {each['nodes'][0]['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
