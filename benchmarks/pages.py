"""Measure the pages in Chromium: `make bench-pages`; names of parts select some.

1. `speed`: a run of 10,000 steps with every measure is written into the database, and its page is opened in a fresh
   window; so is a rollout of 32,768 tokens, with texts. Seconds are CPU time of the main thread (thread ticks of the
   browser's own metrics), which other processes hardly affect.
2. `questions`: what a newcomer asks, answered by a script that looks and clicks (`benchmarks/questions.py`).
3. `whole`: every page at 390, 768, 1,440 and 2,560 px, light and dark, by keyboard, with axe-core.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Browser, CDPSession, Page
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.bars import Line, report_parts
from benchmarks.forking import environment
from benchmarks.queries import fill_steps
from benchmarks.questions import MOST_CLICKS, QUESTIONS
from benchmarks.running_service import service
from examples.demo.records import COLLAPSED
from foreshock.rollouts import BatchAttributes, RolloutBatch
from scripts.chromium import MISSING, chromium_program, running_chromium
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import Fleet, send_fleet
from tests.service.present.pages.test_every_page import (
    PAGES,
    test_keyboard_reaches_every_action_and_shows_where_it_is,
    test_nothing_is_cut_on_a_wide_screen,
    test_page_is_whole_at_every_width_in_light_and_dark,
)
from tests.service.sending import start_run

STEPS, TOKENS, REPEATS = 10_000, 32_768, 5
VOCABULARY = 150_000
BAR_FIRST_PLOT_SECONDS, BAR_PAGE_SECONDS, BAR_ROLLOUT_SECONDS = 0.5, 0.7, 0.3
BAR_WEIGHT_KB = 120.0
BAR_SCROLL_SECONDS = 0.016
"""Main-thread time of one scroll through the tokens: a frame at 60 Hz."""
SCROLLS = 100
PLOTLY = "plotly-basic"
FIRST_PLOT = "[data-figure] svg.main-svg g.trace"


def main() -> int:
    """Measure the parts that are named, without names all; return 1 if a bar is not reached."""
    if chromium_program() is None:
        print(MISSING)
        return 1
    return report_parts({"speed": speed, "questions": questions, "whole": whole}, sys.argv[1:])


def speed() -> list[Line]:
    """Open a long run and a long rollout."""
    with tempfile.TemporaryDirectory() as tokenizers, running_chromium() as browser:
        write_vocabulary(Path(tokenizers))
        with service(FORESHOCK_TOKEN_PASS="numpy", FORESHOCK_TOKENIZERS_FOLDER=tokenizers) as (folder, http):
            url = str(http.base_url).rstrip("/")
            run = start_run(http, "long").run
            fill_steps(folder, run, STEPS)
            rollout = send_long_rollout(http)
            plots = [first_plot(browser, f"{url}/runs/{run}") for _ in range(REPEATS)]
            rollouts = [tokens_scrolled(browser, url + rollout) for _ in range(REPEATS)]
    return [
        Line(
            "first_plot_s", f"main-thread time to the first plot of {STEPS:,} steps, s",
            median(each[0] for each in plots), BAR_FIRST_PLOT_SECONDS,
        ),
        Line("page_s", "… until the whole page is drawn, s", median(each[1] for each in plots), BAR_PAGE_SECONDS),
        Line(
            "weight_kb", f"compressed kB of {plots[0][3]} answers, without Plotly",
            max(each[2] for each in plots), BAR_WEIGHT_KB,
        ),
        Line(
            "rollout_s", f"a rollout of {TOKENS:,} tokens with texts, s of the same",
            median(each[1] for each in rollouts), BAR_ROLLOUT_SECONDS,
        ),
        Line("scroll_s", "a scroll through it, s of it", median(each[0] for each in rollouts), BAR_SCROLL_SECONDS),
    ]  # fmt: skip


@contextmanager
def _fleet() -> Iterator[Fleet]:
    """Yield a service with a run of each of five kinds, and the demo's run that collapsed."""
    settings = {"FORESHOCK_STEP_GRACE_SECONDS": "0.5", "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.2"}
    with service(FORESHOCK_TOKEN_PASS="numpy", **settings) as (folder, http):
        fleet = send_fleet(http)
        command = [sys.executable, "-m", "foreshock.commands.main", "import", str(COLLAPSED), "--run-key", "collapsed"]
        surroundings = environment(FORESHOCK_URL=fleet.url, FORESHOCK_SPOOL_DIRECTORY=str(folder / "spool"))
        subprocess.run(command, env=surroundings, check=True, capture_output=True, cwd=folder)
        ids = fleet.ids | {"collapsed": http.get("/v1/runs/collapsed").raise_for_status().json()["id"]}
        yield replace(fleet, ids=ids)


def questions() -> list[Line]:
    """Ask each question of each of six runs."""
    with _fleet() as fleet, running_chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        found = {question: [ask(page, fleet, name) for name in fleet.ids] for question, ask in QUESTIONS.items()}
    for question, answers in found.items():
        for name, each in zip(fleet.ids, answers, strict=True):
            if not each.is_right:
                print(f"{name}: {question} Expected {each.expected!r}, got {each.given!r}")
    right = sum(all(each.is_right for each in answers) for answers in found.values())
    asked = f"{len(found)} questions on {len(fleet.ids)} runs"
    clicks = max(each.clicks for answers in found.values() for each in answers)
    return [
        Line("questions_right", f"{asked}: right on all of them", right, len(found), at_least=True),
        Line("clicks", "… clicks to the answer, at most", clicks, MOST_CLICKS),
    ]


def whole() -> list[Line]:
    """Count the pages on which a check of tests/service/present/pages/test_every_page.py fails."""
    checks = {
        "wrong": (
            "overflow, console errors, serious findings of axe",
            test_page_is_whole_at_every_width_in_light_and_dark,
        ),
        "cut": ("something cut at 2,560 px", test_nothing_is_cut_on_a_wide_screen),
        "unreached": ("actions that the keyboard does not reach", _keyboard),
    }
    failed = dict.fromkeys(checks, 0)
    with _fleet() as fleet, running_chromium() as browser:
        context = browser.new_context()
        for name in PAGES:
            for key, (_, check) in checks.items():
                visit = Visit(context.new_page())
                try:
                    check(visit, fleet, name)
                except AssertionError as error:
                    print(f"{name}: {error}")
                    failed[key] += 1
                visit.page.close()
    return [Line(key, f"of {len(PAGES)} pages, with {text}", failed[key], 0) for key, (text, _) in checks.items()]


def _keyboard(visit: Visit, fleet: Fleet, name: str) -> None:
    test_keyboard_reaches_every_action_and_shows_where_it_is(visit, fleet, name, 1440)


def first_plot(browser: Browser, address: str) -> tuple[float, float, float, int]:
    """Return main-thread seconds until the first plot and until all, and kB and number of the answers but Plotly's."""
    with _window(browser) as (page, session):
        weights: dict[str, float] = {}
        addresses: dict[str, str] = {}

        def received(event: dict[str, Any]) -> None:
            addresses[event["requestId"]] = event["response"]["url"]

        def finished(event: dict[str, Any]) -> None:
            weights[event["requestId"]] = event["encodedDataLength"]

        session.on("Network.responseReceived", received)
        session.on("Network.loadingFinished", finished)
        session.send("Network.enable")
        page.goto(address)
        page.wait_for_selector(FIRST_PLOT)
        seconds = main_thread_seconds(session)
        page.wait_for_selector("body[data-drawn=yes]")
        drawn = main_thread_seconds(session)
        counted = [weight for request, weight in weights.items() if PLOTLY not in addresses.get(request, "")]
    return seconds, drawn, sum(counted) / 1000, len(counted)


def tokens_scrolled(browser: Browser, address: str) -> tuple[float, float]:
    """Return main-thread seconds of one scroll by a screen through a rollout, and of opening it."""
    with _window(browser) as (page, session):
        page.goto(address)
        page.wait_for_selector("body[data-drawn=yes]")
        opened = main_thread_seconds(session)
        page.evaluate(f"""async () => {{
          const pane = document.querySelector(".tokens");
          for (let at = 0; at < {SCROLLS}; at++) {{
            pane.scrollTop = at * pane.clientHeight;
            await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
          }}
        }}""")
        return (main_thread_seconds(session) - opened) / SCROLLS, opened


def main_thread_seconds(session: CDPSession) -> float:
    """Return the CPU seconds of the page's main thread so far."""
    found: dict[str, Any] = session.send("Performance.getMetrics")
    return float(next(each["value"] for each in found["metrics"] if each["name"] == "TaskDuration"))


@contextmanager
def _window(browser: Browser) -> Iterator[tuple[Page, CDPSession]]:
    """Yield a page without a cache, and its session, whose metrics are in CPU time."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(300_000)
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    yield page, session
    context.close()


def write_vocabulary(root: Path) -> None:
    """Write the tokenizer of the model `large` below `root`."""
    (root / "large").mkdir()
    words = {f"▁word{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="▁word0")).save(str(root / "large" / "tokenizer.json"))


def send_long_rollout(http: httpx.Client) -> str:
    """Send a rollout of 32,768 tokens, and return the path of its page."""
    random = np.random.default_rng(3)
    behaviour = -random.exponential(1.0, TOKENS).astype(np.float32)
    batch = RolloutBatch(
        sample_ids=["long"],
        prompt_token_ids=np.arange(64, dtype=np.int32),
        prompt_offsets=np.array([0, 64]),
        response_token_ids=random.integers(0, VOCABULARY, TOKENS).astype(np.int32),
        response_offsets=np.array([0, TOKENS]),
        rollout_log_probs=behaviour,
        trainer_log_probs=np.minimum(behaviour + random.normal(0.0, 0.02, TOKENS), 0.0).astype(np.float32),
        attributes=BatchAttributes(temperature=1.0),
    )
    start_run(http, "rollout", model="large").put_shard(1, batch).raise_for_status()
    return "/runs/default/rollout/steps/1/rollouts/long"


if __name__ == "__main__":
    sys.exit(main())
