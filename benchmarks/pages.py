"""Bars of the pages in Chromium: main-thread time until the first plot of a long run, page weight, a long rollout.

A run of 10,000 steps with every measure is written into the database; its page is opened in a fresh window. The main
thread's time is its CPU time (thread ticks of the browser's own metrics), which other processes hardly affect.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Browser, CDPSession, Page

from benchmarks.bars import Line, report
from benchmarks.queries import fill_steps
from benchmarks.running_service import service
from foreshock.rollouts import BatchAttributes, RolloutBatch
from scripts.chromium import MISSING, chromium_program, running_chromium
from tests.service.sending import start_run

STEPS, TOKENS, REPEATS = 10_000, 32_768, 5
BAR_FIRST_PLOT_SECONDS = 0.7
BAR_WEIGHT_KB = 120.0
BAR_SCROLL_SECONDS = 0.016
"""Main-thread time of one scroll through the tokens: a frame at 60 Hz."""
SCROLLS = 100
PLOTLY = "plotly-basic"
FIRST_PLOT = "[data-figure] svg.main-svg g.trace"


def main() -> int:
    """Measure the bars; return 1 if one is not reached."""
    if chromium_program() is None:
        print(MISSING)
        return 1
    with service(FORESHOCK_TOKEN_PASS="numpy") as (folder, http), running_chromium() as browser:
        url = str(http.base_url).rstrip("/")
        run = start_run(http, "long").run
        fill_steps(folder, run, STEPS)
        rollout = send_long_rollout(http)
        plots = [first_plot(browser, f"{url}/runs/{run}") for _ in range(REPEATS)]
        scroll, opened = tokens_scrolled(browser, url + rollout)
    return report(
        [
            Line(
                "first_plot_s", f"main-thread time to the first plot of {STEPS:,} steps, s",
                median(each[0] for each in plots), BAR_FIRST_PLOT_SECONDS,
            ),
            Line(
                "weight_kb", f"compressed kB of {plots[0][2]} answers, without Plotly",
                max(each[1] for each in plots), BAR_WEIGHT_KB,
            ),
            Line("scroll_s", f"a scroll through {TOKENS:,} tokens, s of the same", scroll, BAR_SCROLL_SECONDS),
        ],
        rollout_open_s=opened,
    )  # fmt: skip


def first_plot(browser: Browser, address: str) -> tuple[float, float, int]:
    """Return main-thread seconds until the first plot, compressed kB of all answers but Plotly's, and their number."""
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
        counted = [weight for request, weight in weights.items() if PLOTLY not in addresses.get(request, "")]
    return seconds, sum(counted) / 1000, len(counted)


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


def send_long_rollout(http: httpx.Client) -> str:
    """Send a rollout of 32,768 tokens, and return the path of its page."""
    random = np.random.default_rng(3)
    behaviour = -random.exponential(1.0, TOKENS).astype(np.float32)
    batch = RolloutBatch(
        sample_ids=["long"],
        prompt_token_ids=np.arange(64, dtype=np.int32),
        prompt_offsets=np.array([0, 64]),
        response_token_ids=random.integers(0, 150_000, TOKENS).astype(np.int32),
        response_offsets=np.array([0, TOKENS]),
        rollout_log_probs=behaviour,
        trainer_log_probs=np.minimum(behaviour + random.normal(0.0, 0.02, TOKENS), 0.0).astype(np.float32),
        attributes=BatchAttributes(temperature=1.0),
    )
    start_run(http, "rollout").put_shard(1, batch).raise_for_status()
    return "/runs/default/rollout/steps/1/rollouts/long"


if __name__ == "__main__":
    sys.exit(main())
