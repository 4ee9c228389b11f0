"""Accessibility by axe-core in Chromium."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Page

from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import Site

pytestmark = pytest.mark.slow

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


def addresses(site: Site) -> list[str]:
    step = f"{site.run.address}/steps/5"
    compared = f"/compare?run={site.run.id}&run={site.replayed.id}"
    rollout = f"{step}/rollouts/5-0"
    replayed = f"{site.replayed.address}/steps/3"
    return [
        "/",
        site.run.address,
        step,
        replayed,
        rollout,
        compared,
        "/alerts",
    ]


def shown(visit: Visit, site: Site, address: str) -> Page:
    """Open a page, and wait for its figures if it has a script."""
    visit.origin = site.url
    visit.go(site.url + address)
    if visit.page.locator("script[type=module]").count():
        visit.page.wait_for_selector("body[data-drawn=yes]")
    return visit.page


@pytest.mark.parametrize(("width", "scheme"), [(390, "light")])
def test_no_page_has_serious_findings(visit: Visit, site: Site, width: int, scheme: str) -> None:
    visit.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    visit.page.set_viewport_size({"width": width, "height": 900})
    found = {address: serious(shown(visit, site, address)) for address in addresses(site)}
    assert {address: each for address, each in found.items() if each} == {}
    visit.assert_clean()
