"""Bar: a scrape of 1,000 active runs with 60 series each takes less than 0.5 s on one core."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.queries.bar import Bar
from benchmarks.queries.filled_database import fill_steps, start_runs
from benchmarks.running_service import running_service

BAR_SECONDS = 0.5
RUNS, STEPS, LONG_RUNS, LONG_STEPS = 1_000, 3, 3, 10_000
REPEATS = 9


def measure() -> Bar:
    """Scrape a service with 1,000 running runs, some of them long, on one core."""
    with tempfile.TemporaryDirectory(prefix="foreshock-scrape-") as name:
        folder = Path(name)
        with (
            running_service(folder, FORESHOCK_TOKEN_PASS="numpy") as url,
            httpx.Client(base_url=url, timeout=600) as http,
        ):
            runs = start_runs(http, RUNS, "scraped")
            fill_steps(folder, runs[LONG_RUNS:], STEPS)
            fill_steps(folder, runs[:LONG_RUNS], LONG_STEPS)
            process = serving_process(url)
            process.cpu_affinity([0])
            for thread in process.threads():
                psutil.Process(thread.id).cpu_affinity([0])
            seconds, cpu = [], []
            for _ in range(REPEATS):
                before, begin = process.cpu_times(), time.perf_counter()
                answer = http.get("/metrics", headers={"Accept-Encoding": "identity"}).raise_for_status()
                seconds.append(time.perf_counter() - begin)
                after = process.cpu_times()
                cpu.append(after.user + after.system - before.user - before.system)
    series = sum(1 for line in answer.text.splitlines() if not line.startswith("#"))
    middle = sorted(seconds)[REPEATS // 2]
    lines = [
        f"scrape of {RUNS:,} active runs, {series:,} series, on one core; {LONG_RUNS} runs of {LONG_STEPS:,} steps",
        f"  seconds: median {middle:.3f}, largest {max(seconds):.3f}; CPU median {sorted(cpu)[REPEATS // 2]:.3f}",
    ]
    values = {"scrape_s": middle, "scrape_cpu_s": sorted(cpu)[REPEATS // 2], "scrape_series": series}
    return Bar("scrape", lines, values, reached=middle < BAR_SECONDS and series >= 60 * RUNS)


def serving_process(url: str) -> psutil.Process:
    """Return the process of the service at an address."""
    port = url.rsplit(":", 1)[1]
    return next(each for each in psutil.Process().children() if port in each.cmdline())
