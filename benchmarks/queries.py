"""Measure how fast the service answers during uploads: `make bench-queries`; names of parts select some.

1. `curves`: 20 measures × 10,000 steps of a run that receives 1 M tokens/s meanwhile. Bar: 100 ms at p99.
2. `polls`: 1,000 runs, each with a trainer that polls its advice with `wait=30`. An operator's hold or release is sent
   to one run after the other. Bar: its trainer receives it within 1.5 s at p99.
3. `derivation`: the ranges of a run of 5,000 steps change from its first step on, while another run uploads. Bars: the
   detection is derived again in 10 s; meanwhile an upload takes at most 2 × as long (median), and at most 1 s.

Runs of many steps are written by SQL, because uploading them would take hours.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from benchmarks.bars import Line, report_parts
from benchmarks.ingest import encoded_shards, put_step
from benchmarks.running_service import service, wait_until_advanced
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.registry import MEASURES, STEP_MEASURES
from foreshock.measures.statistics.conditions import BUCKET_EDGES
from tests.service.sending import Sender, start_run

DATABASE = "foreshock-data/foreshock.db"
MEASURED = [measure.name for measure in MEASURES if measure not in STEP_MEASURES][:20]
LARGE, SMALL = (128, 1_000), (8, 20)
CURVE_STEPS, REPEATS, TOKENS_PER_SECOND, BAR_CURVES = 10_000, 200, 1e6, 0.1
RUNS, CHANGES, BAR_POLL = 1_000, 200, 1.5
DERIVED_STEPS, BAR_DERIVED, BAR_SLOWER, BAR_UPLOAD = 5_000, 10.0, 2.0, 1.0


def fill_steps(folder: Path, run: str, steps: int) -> None:
    """Write `steps` closed steps with two measured comparisons into a run."""
    counts = dict.fromkeys(("expected_shards", "received_shards", "folded_shards", "rollouts", "tokens"), 1)
    times = dict.fromkeys(("first_shard_at_us", "last_shard_at_us", "closed_at_us"), 1)
    keys = [{"run_id": run, "attempt": 1, "step": step} for step in range(steps)]
    newest = {"run_id": run, "attempt": 1, "step": steps - 1, "revision": steps, "rewritten": 1}
    newest |= {"shown_attempt": 1, "shown_step": steps - 1}
    newest |= {"buckets": np.ones((2, len(BUCKET_EDGES) - 1)).tobytes()}
    with closing(sqlite3.connect(folder / DATABASE, timeout=60)) as database, database:
        _insert(database, "steps", [{**key, **counts, **times} for key in keys])
        for comparison in (STEP_ROW, TRAINER_ROLLOUT):
            rows = [{**key, "comparison": comparison, "from_sample": False, "computed_at_us": 1} for key in keys]
            for step, row in enumerate(rows):
                row |= {each.column: 1e-3 * math.sin(step * 0.01 + place) + 1e-2 for place, each in enumerate(MEASURES)}
            _insert(database, "measurements", rows)
            _insert(database, "newest_measurements", [{**newest, "comparison": comparison}])
        database.execute(
            "UPDATE runs SET last_step = ?, rollouts = ?, tokens = ? WHERE id = ?", (*[steps - 1] * 3, run)
        )


def _insert(database: sqlite3.Connection, table: str, rows: Sequence[dict[str, object]]) -> None:
    names, marks = ", ".join(rows[0]), ", ".join("?" * len(rows[0]))
    database.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", [tuple(row.values()) for row in rows])


@contextmanager
def steady_uploads(url: str, run: str, size: tuple[int, int], each: float, first: int) -> Iterator[Synchronized[int]]:
    """Upload a step of a run every `each` seconds from another process; yield the number of closed steps."""
    spawning = multiprocessing.get_context("spawn")
    sent: Synchronized[int] = spawning.Value("q", 0)
    process = spawning.Process(target=_upload, args=(url, run, size, each, first, sent))
    process.start()
    try:
        while sent.value == 0 and process.is_alive():
            time.sleep(0.05)
        yield sent
    finally:
        process.terminate()
        process.join()


def _upload(url: str, run: str, size: tuple[int, int], each: float, first: int, sent: Synchronized[int]) -> None:
    (body,) = encoded_shards(*size, 1)
    with httpx.Client(base_url=url, timeout=600) as http:
        due = time.monotonic()
        while True:
            put_step(Sender(http, run), first + sent.value, body)
            sent.value += 1
            due = max(due + each, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))


def curves() -> list[Line]:
    """Request the curves of a run again and again while its steps arrive."""
    with service() as (folder, http):
        run = start_run(http, "curves")
        fill_steps(folder, run.run, CURVE_STEPS)
        # The first upload derives the detection of the steps that SQL wrote; the part `derivation` measures that.
        (body,) = encoded_shards(*SMALL, 1)
        put_step(run, CURVE_STEPS, body)
        wait_until_advanced(http, run.run)
        alone = _curve_seconds(run, REPEATS // 2)
        tokens = LARGE[0] * LARGE[1]
        with steady_uploads(str(http.base_url), run.run, LARGE, tokens / TOKENS_PER_SECOND, CURVE_STEPS + 1) as sent:
            before, begin = sent.value, time.perf_counter()
            seconds = _curve_seconds(run, REPEATS)
            rate = tokens * (sent.value - before) / (time.perf_counter() - begin)
    return [
        Line("curves_p99_ms", "curves at p99, ms", 1e3 * float(np.percentile(seconds, 99)), 1e3 * BAR_CURVES),
        Line("curves_tokens_per_s", "tokens/s meanwhile", rate, 0.98 * TOKENS_PER_SECOND, at_least=True),
        Line("curves_alone_p99_ms", "curves without uploads, at p99, ms", 1e3 * float(np.percentile(alone, 99))),
        Line("curves_median_ms", "curves, the median, ms", 1e3 * median(seconds)),
    ]


def _curve_seconds(run: Sender, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        asked = time.perf_counter()
        answer = run.get("measurements", comparison=TRAINER_ROLLOUT, measure=MEASURED).raise_for_status()
        seconds.append(time.perf_counter() - asked)
        assert answer.content.count(b'"trainer/rollout"') >= CURVE_STEPS
        time.sleep(0.1)
    return seconds


def polls() -> list[Line]:
    """Change the advice of one run after the other, while the trainer of each polls it."""
    with service(FORESHOCK_TOKEN_PASS="numpy") as (_, http):
        runs = [start_run(http, f"polled-{number}", advice_mode="apply").run for number in range(RUNS)]
        seconds = asyncio.run(_changes(str(http.base_url), runs))
    return [
        Line("poll_p99_s", "a trainer hears of a change, p99, s", float(np.percentile(seconds, 99)), BAR_POLL),
        Line("poll_median_s", "… the median, s", median(seconds)),
        Line("poll_max_s", "… the longest, s", max(seconds)),
    ]


async def _changes(url: str, runs: list[str]) -> list[float]:
    heard: dict[str, asyncio.Future[float]] = {}
    address = httpx.URL(url)

    async def poll(run: str) -> None:
        # Each trainer has its own connection. No HTTP client, because one with 1,000 connections needs a core.
        reader, writer = await asyncio.open_connection(address.host, address.port)
        wait, tag = "", ""
        try:
            while True:
                target = f"GET /v1/runs/{run}/lr-advice?step=1{wait} HTTP/1.1\r\nHost: 127.0.0.1\r\n{tag}\r\n"
                writer.write(target.encode())
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                if " 304 " not in first:
                    assert " 200 " in first, first
                    await reader.readexactly(int(headers["content-length"]))
                    if wait and run in heard:
                        heard.pop(run).set_result(time.perf_counter())
                wait, tag = "&wait=30", f"If-None-Match: {headers['etag']}\r\n"
        finally:
            writer.close()

    trainers = []
    for run in runs:
        trainers.append(asyncio.create_task(poll(run)))
        await asyncio.sleep(0.01)
    await asyncio.sleep(5.0)
    seconds = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for run in runs[:: len(runs) // CHANGES]:
            heard[run] = asyncio.get_running_loop().create_future()
            future, begin = heard[run], time.perf_counter()
            body = {"kind": "hold", "reason": "benchmark"}
            (await http.post(f"/v1/runs/{run}/advice/decisions", json=body)).raise_for_status()
            seconds.append(await asyncio.wait_for(future, 60) - begin)
    for each in trainers:
        each.cancel()
    ended = await asyncio.gather(*trainers, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
    return seconds


def derivation() -> list[Line]:
    """Change the ranges of a long run from its first step on, while another run uploads."""
    (body,) = encoded_shards(*SMALL, 1)
    with service() as (folder, http):
        long, other = start_run(http, "long"), start_run(http, "other")
        fill_steps(folder, long.run, DERIVED_STEPS)
        put_step(long, DERIVED_STEPS, body)
        wait_until_advanced(http, long.run)
        quiet = [put_step(other, step, body) for step in range(100)]
        begin = time.perf_counter()
        http.patch(f"/v1/runs/{long.run}", json={"model_kind": "moe"}).raise_for_status()
        busy: list[float] = []
        while http.get(f"/v1/runs/{long.run}").raise_for_status().json()["advancing"]:
            busy.append(put_step(other, 100 + len(busy), body))
            time.sleep(0.05)
        seconds = time.perf_counter() - begin
    return [
        Line("derived_s", f"{DERIVED_STEPS:,} steps derived again, s", seconds, BAR_DERIVED),
        Line("upload_times", "uploads meanwhile, times the median", median(busy) / median(quiet), BAR_SLOWER),
        Line("upload_max_s", "the slowest of them, s", max(busy), BAR_UPLOAD),
        Line("uploads", "uploads meanwhile", len(busy)),
    ]


PARTS = {"curves": curves, "polls": polls, "derivation": derivation}

if __name__ == "__main__":
    sys.exit(report_parts(PARTS, sys.argv[1:]))
