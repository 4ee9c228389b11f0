"""Runs with little, odd or broken data have pages that are whole, and say what is missing."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from foreshock_service.platform.decoding.pool import DecoderPool
from tests.service.present.pages.bad_runs import KINDS, MARKUP, send_bad_runs
from tests.service.present.pages.browsing import Visit, serious
from tests.service.present.pages.conftest import running_app
from tests.service.present.pages.test_every_page import SIZES

SENTENCES = {
    "nothing": "Unknown: no step is complete yet.",
    "one step": "Unknown: 1 step with both log-probs (5 needed)",
    "one rollout": "Unknown: 1 step with both log-probs (5 needed)",
    "only lengths": "Unknown: no step has both log-probs.",
    "only scalars": "Unknown: no step has both log-probs; the reward, 0.85, is near its best.",
    "no reward": "Unknown: 979 tokens measured in the newest steps, 1,000 are needed",
    "10,000 scalars": "Unknown: ",
    "NaN everywhere": "Warning since step 1: all rollout_log_probs and trainer_log_probs are NaN or infinite.",
    "500 alerts": "Critical since step 1: scalar 0 is above 1; ",
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path, decoders: DecoderPool) -> Iterator[str]:
    """The address of a service with the runs, in the project "bad"."""
    folder = tmp_path_factory.mktemp("bad")
    shutil.copy(sqlite_template, folder / "foreshock.db")
    with running_app(folder, decoders) as (http, app):
        send_bad_runs(http, app.state.context.database)
        yield str(http.base_url).rstrip("/")


def address_of(name: str) -> str:
    return f"/runs/bad/{quote(name, safe='')}"


@pytest.mark.parametrize("name", SENTENCES)
def test_first_sentence_says_what_is_there(bad: str, name: str) -> None:
    page = httpx.get(bad + address_of(name)).raise_for_status().text
    assert f"<p><strong>{SENTENCES[name]}" in page


def test_alerts_are_counted_and_the_gravest_come_first(bad: str) -> None:
    page = httpx.get(bad + address_of("500 alerts")).raise_for_status().text
    (shown,) = re.findall(r"(\d+) open alerts", page)
    assert int(shown) >= 500
    severities = re.findall(r'<summary><span class="badge \w*">(\w+)</span> <strong>', page)
    # One line a cause, at most eight.
    assert severities == ["critical"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("address", ["/", "/alerts", *map(address_of, KINDS)])
def test_page_is_whole(visit: Visit, bad: str, address: str) -> None:
    for width in (390, 1440):
        visit.page.set_viewport_size({"width": width, "height": SIZES[width]})
        visit.origin = bad
        visit.go(bad + address)
        page = visit.page
        if address.startswith("/runs/"):
            page.wait_for_selector("body[data-drawn=yes]")
            if width == 390:
                visit.unfold()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not re.search(r"\b(nan|None|undefined|Infinity)\b", page.locator("main").inner_text())
    assert serious(visit.page) == []
    visit.assert_clean()


@pytest.mark.slow
def test_of_10000_scalars_the_first_are_drawn_and_a_word_finds_the_others(visit: Visit, bad: str) -> None:
    page = visit.open(bad, f"{address_of('10,000 scalars')}#scalars")
    part = page.locator("#scalars")
    part.get_by_text("10\u2009000 of 10\u2009000 scalars, the first 240 are shown: type more of a name").wait_for()
    part.get_by_label("Filter").fill("09999")
    part.get_by_text("1 of 10\u2009000 scalars").wait_for()
    page.wait_for_function("() => document.querySelectorAll('#scalars g.trace').length === 1")
    visit.assert_clean()


@pytest.mark.slow
def test_markup_is_shown_as_text_on_every_page_of_its_run(visit: Visit, bad: str) -> None:
    run = address_of(MARKUP)
    rollout = f"{run}/steps/1/rollouts/{quote(f'{MARKUP}0', safe='')}"
    for address in (run, f"{run}/steps/2", rollout):
        page = visit.open(bad, address, unfold=True)
        assert MARKUP in page.locator("main").inner_text()
        assert page.locator("main [onclick], main a[href^=javascript]").count() == 0
    visit.assert_clean()
