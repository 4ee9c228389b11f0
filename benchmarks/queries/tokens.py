"""Bar: one rollout's tokens out of a step of 1,024 rollouts come in less than 30 ms at p99."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from benchmarks.queries.bar import Bar
from benchmarks.queries.scrape import serving_process
from benchmarks.queries.uploads import PARQUET, encoded_batch
from benchmarks.running_service import running_service

BAR_SECONDS = 0.030
ROLLOUTS, TOKENS, REPEATS = 1_024, 1_000, 200


def measure() -> Bar:
    """Ask for rollouts of one step, a different one each time."""
    with tempfile.TemporaryDirectory(prefix="foreshock-tokens-") as name:
        folder = Path(name)
        with (
            running_service(folder, FORESHOCK_TOKEN_PASS="numpy") as url,
            httpx.Client(base_url=url, timeout=600) as http,
        ):
            run = http.post("/v1/runs", json={"key": "tokens"}).raise_for_status().json()["id"]
            http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}).raise_for_status()
            body = encoded_batch(ROLLOUTS, TOKENS)
            path = f"/v1/runs/{run}/steps/1/rollouts/0"
            http.put(path, content=body, headers={"Content-Type": PARQUET}).raise_for_status()
            process, seconds = serving_process(url), []
            before = process.cpu_times()
            for number in np.random.default_rng(0).integers(0, ROLLOUTS, REPEATS):
                begin = time.perf_counter()
                answer = http.get(f"/v1/runs/{run}/steps/1/tokens", params={"sample_id": f"sample-{number}"})
                seconds.append(time.perf_counter() - begin)
                assert len(answer.raise_for_status().json()["items"]) == TOKENS
            after = process.cpu_times()
    cpu = (after.user + after.system - before.user - before.system) / REPEATS
    middle, p99 = sorted(seconds)[REPEATS // 2], sorted(seconds)[int(0.99 * REPEATS)]
    lines = [
        f"one rollout of {TOKENS:,} tokens out of a step of {ROLLOUTS:,} rollouts",
        f"  ms: median {1e3 * middle:.1f}, p99 {1e3 * p99:.1f}, largest {1e3 * max(seconds):.1f}",
        f"  CPU of the service for each: {1e3 * cpu:.1f} ms",
    ]
    values = {"tokens_ms": 1e3 * middle, "tokens_p99_ms": 1e3 * p99, "tokens_cpu_ms": 1e3 * cpu}
    return Bar("tokens", lines, values, reached=p99 < BAR_SECONDS)
