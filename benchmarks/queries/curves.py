"""Bar: 20 measures × 10,000 steps come in less than 100 ms at p99 while the same run takes 1 M tokens/s of uploads."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.queries.bar import Bar
from benchmarks.queries.filled_database import fill_steps, start_runs
from benchmarks.queries.uploads import steady_uploads
from benchmarks.running_service import running_service
from foreshock.measures.registry import MEASURES, STEP_MEASURES

BAR_SECONDS = 0.100
STEPS, REPEATS, PAUSE_SECONDS = 10_000, 200, 0.1
TOKENS_PER_SECOND = 1_000_000
MEASURED = [measure.name for measure in MEASURES if measure not in STEP_MEASURES][:20]


def measure() -> Bar:
    """Ask for the curves of a run again and again while its steps arrive."""
    with tempfile.TemporaryDirectory(prefix="foreshock-curves-") as name:
        folder = Path(name)
        with running_service(folder) as url, httpx.Client(base_url=url, timeout=600) as http:
            (run,) = start_runs(http, 1, "curves")
            fill_steps(folder, [run], STEPS)
            quiet = _times(http, run, REPEATS // 4)
            with steady_uploads(url, "curves-0", TOKENS_PER_SECOND, STEPS) as sent:
                before, begin = sent.value, time.perf_counter()
                busy = _times(http, run, REPEATS)
                rate = (sent.value - before) / (time.perf_counter() - begin)
    p99 = busy[int(0.99 * len(busy))]
    lines = [
        f"{len(MEASURED)} measures × {STEPS:,} steps, while the run takes {rate / 1e6:.2f} M tokens/s",
        f"  ms without uploads: median {1e3 * quiet[len(quiet) // 2]:.1f}, largest {1e3 * quiet[-1]:.1f}",
        f"  ms with them: median {1e3 * busy[len(busy) // 2]:.1f}, p99 {1e3 * p99:.1f}, largest {1e3 * busy[-1]:.1f}",
    ]
    values = {"curves_p99_ms": 1e3 * p99, "curves_median_ms": 1e3 * busy[len(busy) // 2], "curves_tokens_per_s": rate}
    return Bar("curves", lines, values, reached=p99 < BAR_SECONDS and rate >= 0.98 * TOKENS_PER_SECOND)


def _times(http: httpx.Client, run: str, repeats: int) -> list[float]:
    query = {"comparison": "trainer/rollout", "measure": MEASURED}
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        # Over loopback compression costs more than it saves.
        answer = http.get(f"/v1/runs/{run}/measurements", params=query, headers={"Accept-Encoding": "identity"})
        seconds.append(time.perf_counter() - begin)
        assert answer.raise_for_status().content.count(b'"trainer/rollout"') >= STEPS
        time.sleep(PAUSE_SECONDS)
    return sorted(seconds)
