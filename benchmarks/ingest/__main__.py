"""How fast does the service ingest, and what does a step cost? `make bench-ingest`, or with fewer tokens and steps
`python -m benchmarks.ingest --tokens 20e6 --steps 1000`.

The service is the real one, in its own processes, on the same cores as the load generator; bodies are encoded
beforehand and sent over a few connections. A request counts when its answer says that the step is closed: committed,
measured by all measures, checked by the lint, observed by the detectors, advice decided.

1. Tokens per second of shards of 128 rollouts × 3,000 tokens, on SQLite and local files, and the memory of all
   processes of the service while `--tokens` of them are ingested.
2. Small steps (8 rollouts × 20 tokens) closed per second around step 100 and around step `--steps`, which are all
   really ingested, without and with eight scalars a step: the median of three windows of 400 steps. The same on
   PostgreSQL up to step POSTGRESQL_STEPS.
3. Bytes of database per small step, between those two steps.

Bars: ≥ 5 M tokens/s; ≥ 100 small steps/s at both steps (SQLite); ≤ 8 kB of database a step; memory < 1 GiB and flat.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sqlalchemy import create_engine, text

from benchmarks.ingest.load import DISTINCT, JSON, Request, encoded_shards, send, start_run
from benchmarks.ingest.processes import MemorySamples, cpu_seconds, sampled_memory
from benchmarks.running_service import running_service
from benchmarks.steps import database_urls
from foreshock_service.platform.database.engine import parse_database_url

BAR_TOKENS, BAR_STEPS, BAR_BYTES, BAR_MEMORY, BAR_GROWTH = 5e6, 100.0, 8_000, 1 << 30, 1.1
LARGE, SMALL = (128, 3_000), (8, 20)
# Steps over which a rate is taken.
WINDOW = 400
WINDOWS = 3
FIRST_WINDOW = 100
WARM_UP = 400
POSTGRESQL_STEPS = 1_000
CONNECTIONS = 4
SCALARS = ("reward", "entropy", "grad_norm", "learning_rate", "kl", "loss", "response_length", "clip_fraction")


@dataclass(frozen=True)
class Rate:
    """What was done in a time: `per_second`, and CPU milliseconds of the service for each."""

    per_second: float
    cpu_ms: float


def measured(address: str, requests: Sequence[Request], count: float, connections: int = CONNECTIONS) -> Rate:
    """Send the requests; the rate of the `count` things that they are."""
    cpu, begin = cpu_seconds(), time.perf_counter()
    send(address, requests, connections)
    seconds = time.perf_counter() - begin
    return Rate(count / seconds, 1e3 * (cpu_seconds() - cpu) / count)


def large_shards(tokens: float) -> tuple[Rate, MemorySamples]:
    """Ingest so many tokens in large shards: tokens per second with CPU per million tokens, and the memory."""
    bodies = encoded_shards(*LARGE, 4)
    each = LARGE[0] * LARGE[1]
    with tempfile.TemporaryDirectory(prefix="foreshock-ingest-") as folder, running_service(Path(folder)) as address:
        run = start_run(address, "large")
        send(address, list(steps(run, bodies, range(8), scalars=False)), CONNECTIONS)
        numbers = range(8, 8 + max(8, round(tokens / each)))
        with sampled_memory() as memory:
            rate = measured(address, list(steps(run, bodies, numbers, scalars=False)), len(numbers) * each / 1e6)
    return rate, memory


def steps(run: str, bodies: Sequence[bytes], numbers: range, *, scalars: bool) -> Iterator[Request]:
    """Yield the requests of these steps: the rollouts in one shard, and then, if wanted, eight scalars."""
    for number in numbers:
        yield Request(f"{run}/steps/{number}/rollouts/0?attempt=1&shards=1", bodies[number % len(bodies)])
        if scalars:
            values = {name: 0.5 + 0.01 * ((number * (index + 3)) % 17) for index, name in enumerate(SCALARS)}
            body = json.dumps({"values": values}).encode()
            yield Request(f"{run}/steps/{number}/scalars?attempt=1", body, JSON, closes=False)


def small_steps(url: str, last: int) -> tuple[dict[tuple[int, bool], Rate], float]:
    """Return the rates by (step, with scalars), and the bytes of database per step between the first windows of one
    run and the last ones.

    A rate is the median of WINDOWS windows: around FIRST_WINDOW of as many runs, around `last` one after the other.
    """
    bodies = encoded_shards(*SMALL, DISTINCT)
    rates: dict[tuple[int, bool], list[Rate]] = {
        (step, on): [] for step in (FIRST_WINDOW, last) for on in (True, False)
    }
    with tempfile.TemporaryDirectory(prefix="foreshock-ingest-") as folder:
        url = url or f"sqlite:///{folder}/foreshock.db"
        with running_service(Path(folder), FORESHOCK_DATABASE_URL=url) as address:
            # The length of a run is measured, not the age of the service: decoders load their machine code first.
            send(address, list(steps(start_run(address, "first"), bodies, range(WARM_UP), scalars=True)), CONNECTIONS)
            for number in range(WINDOWS):
                for scalars in (True, False):
                    run = start_run(address, f"small {number} {scalars}")
                    send(address, list(steps(run, bodies, range(FIRST_WINDOW), scalars=scalars)), CONNECTIONS)
                    rates[FIRST_WINDOW, scalars].append(_window(address, run, bodies, FIRST_WINDOW, scalars=scalars))
            before = database_bytes(url)
            send(address, list(steps(run, bodies, range(FIRST_WINDOW + WINDOW, last), scalars=False)), CONNECTIONS)
            each = (database_bytes(url) - before) / (last - FIRST_WINDOW - WINDOW)
            windows = iter(range(last, last + 2 * WINDOWS * WINDOW, WINDOW))
            for _ in range(WINDOWS):
                for scalars in (False, True):
                    rates[last, scalars].append(_window(address, run, bodies, next(windows), scalars=scalars))
    return {key: _median(found) for key, found in rates.items()}, each


def _window(address: str, run: str, bodies: Sequence[bytes], first: int, *, scalars: bool) -> Rate:
    requests = list(steps(run, bodies, range(first, first + WINDOW), scalars=scalars))
    return measured(address, requests, WINDOW)


def _median(rates: Sequence[Rate]) -> Rate:
    return Rate(median(each.per_second for each in rates), median(each.cpu_ms for each in rates))


def database_bytes(url: str) -> int:
    """Return the bytes of the tables and indexes of a database."""
    parsed = parse_database_url(url)
    if parsed.get_backend_name() == "sqlite":
        connection = sqlite3.connect(str(parsed.database))
        try:
            (pages,), (size,) = (
                connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
            )
        finally:
            connection.close()
        return int(pages) * int(size)
    engine = create_engine(parsed)
    try:
        with engine.connect() as connected:
            return int(connected.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    finally:
        engine.dispose()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=500e6, help="tokens of large shards (default 500e6)")
    parser.add_argument("--steps", type=int, default=10_000, help="the second step of small steps (default 10,000)")
    parser.add_argument("--only", choices=["large", "small", "postgresql"], help="one part, for a profile")
    arguments = parser.parse_args()
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    reached, pairs = True, []
    if arguments.only in (None, "large"):
        rate, memory = large_shards(arguments.tokens)
        print(f"\nshards of {LARGE[0]} × {LARGE[1]:,} tokens: {rate.per_second:.2f} M tokens/s (bar 5),", end=" ")
        print(f"{rate.cpu_ms:.1f} ms of CPU of the service per million tokens")
        print(
            f"memory over {arguments.tokens / 1e6:,.0f} M tokens: peak {memory.peak / 2**20:,.0f} MiB (bar 1,024),",
            end=" ",
        )
        print(f"last third over second third {memory.growth:.3f} (bar {BAR_GROWTH})", flush=True)
        reached &= rate.per_second * 1e6 >= BAR_TOKENS and memory.peak < BAR_MEMORY and memory.growth <= BAR_GROWTH
        pairs += [f"tokens_per_second={rate.per_second * 1e6:.0f}", f"cpu_ms_per_million_tokens={rate.cpu_ms:.1f}"]
        pairs += [f"memory_peak_mib={memory.peak / 2**20:.0f}", f"memory_growth={memory.growth:.3f}"]
    databases = {"small": ["sqlite"], "postgresql": ["postgresql"], "large": []}
    for database in databases.get(arguments.only, ["sqlite", "postgresql"]):
        ok, found = _small(database, arguments.steps if database == "sqlite" else POSTGRESQL_STEPS)
        reached &= ok or database != "sqlite"
        pairs += found
    print()
    print(*pairs, f"reached={str(reached).lower()}")
    return 0 if reached else 1


def _small(database: str, last: int) -> tuple[bool, list[str]]:
    if database == "sqlite":
        rates, each = small_steps("", last)
    else:
        with database_urls() as urls:
            rates, each = small_steps(urls[database], last)
    print(
        f"\n{database}: {SMALL[0]} rollouts × {SMALL[1]} tokens a step, {each / 1e3:.2f} kB of database a step (bar 8)"
    )
    print(f"{'step':>7s} {'scalars':>8s} {'steps/s':>8s} {'CPU ms of the service per step':>31s}")
    pairs = [f"{database}_bytes_per_step={each:.0f}"]
    for (step, scalars), rate in sorted(rates.items()):
        print(f"{step:7,d} {'8' if scalars else 'none':>8s} {rate.per_second:8.1f} {rate.cpu_ms:31.2f}", flush=True)
        name = f"{database}_steps_per_second_{step}" + ("_with_scalars" if scalars else "")
        pairs += [f"{name}={rate.per_second:.1f}", f"{name.replace('steps_per_second', 'cpu_ms')}={rate.cpu_ms:.2f}"]
    closed = [rate.per_second for (_, scalars), rate in rates.items() if not scalars]
    return min(closed) >= BAR_STEPS and each <= BAR_BYTES, pairs


if __name__ == "__main__":
    sys.exit(main())
