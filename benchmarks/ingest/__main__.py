"""How fast does the service ingest, beside an earlier revision? `make bench-ingest`.

The service is the real one, in its own processes, on the same cores as the load generator; bodies are encoded
beforehand and sent over a few connections. A request counts when its answer says that the step is closed.

1. CPU time of a step of 128 rollouts × 3,000 tokens, here and at the revision BESIDE, in alternating windows.
2. Tokens per second of such steps, and the memory of all processes of the service while `--tokens` are ingested.
3. Small steps (8 rollouts × 20 tokens) per second, and bytes of database a step.

Bars: 1.1 × the CPU; 5 M tokens/s, memory below 1 GiB and flat; 20 small steps/s; 20 kB of database a small step.
"""

from __future__ import annotations

import argparse
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.ingest.load import DISTINCT, Request, encoded_shards, send, start_run
from benchmarks.ingest.processes import MemorySamples, cpu_seconds, sampled_memory
from benchmarks.running_service import running_service

REPOSITORY = Path(__file__).resolve().parents[2]
BESIDE = "edd6602"
"""The revision before this package was halved, with the import names of today."""
BAR_CPU, BAR_TOKENS, BAR_MEMORY, BAR_GROWTH, BAR_STEPS, BAR_BYTES = 1.1, 5e6, 1 << 30, 1.1, 20.0, 20_000
LARGE, SMALL = (128, 3_000), (8, 20)
CONNECTIONS = 4
WARM_UP, WINDOW, WINDOWS = 8, 8, 9
SMALL_STEPS = 600


@dataclass(frozen=True)
class Rate:
    """Things done per second, and CPU seconds of the service's processes for each."""

    per_second: float
    cpu: float


def measured(address: str, requests: Sequence[Request], parent: str = "") -> Rate:
    """Send the requests; return the rate of their answers. `parent` limits the CPU time to one service."""
    cpu, begin = cpu_seconds(parent), time.perf_counter()
    send(address, requests, CONNECTIONS)
    seconds = time.perf_counter() - begin
    return Rate(len(requests) / seconds, (cpu_seconds(parent) - cpu) / len(requests))


def steps(run: str, bodies: Sequence[bytes], numbers: range) -> list[Request]:
    """Return the requests of these steps: the rollouts in one shard."""
    return [
        Request(f"{run}/steps/{number}/rollouts/0?attempt=1&shards=1", bodies[number % len(bodies)])
        for number in numbers
    ]


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check a revision out in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="foreshock-beside-") as name:
        folder = Path(name) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", folder, revision], cwd=REPOSITORY, check=True, stdout=-3)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=REPOSITORY, check=True)


def paired_cpu(revision: str) -> tuple[float, float]:
    """Return the CPU seconds of a large step, at the revision and here: medians of alternating windows."""
    bodies = encoded_shards(*LARGE, 4)
    found: dict[str, list[float]] = {"before": [], "now": []}
    with checkout(revision) as tree, ExitStack() as stack:
        runs = {}
        for name, source in (("before", tree), ("now", REPOSITORY)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"foreshock-{name}-")))
            address = stack.enter_context(running_service(folder, PYTHONPATH=str(source)))
            runs[name] = (address, start_run(address, "large"), str(folder))
        for window in range(WINDOWS + 1):
            numbers = range(window * WINDOW, (window + 1) * WINDOW)
            for name in sorted(runs, reverse=bool(window % 2)):
                address, run, folder_name = runs[name]
                rate = measured(address, steps(run, bodies, numbers), folder_name)
                if window:  # the first one warms up
                    found[name].append(rate.cpu)
    return median(found["before"]), median(found["now"])


def large_steps(tokens: float) -> tuple[Rate, MemorySamples]:
    """Ingest so many tokens in large steps; return the rate of steps, and the memory."""
    bodies = encoded_shards(*LARGE, 4)
    with tempfile.TemporaryDirectory(prefix="foreshock-ingest-") as folder, running_service(Path(folder)) as address:
        run = start_run(address, "large")
        send(address, steps(run, bodies, range(WARM_UP)), CONNECTIONS)
        numbers = range(WARM_UP, WARM_UP + max(WARM_UP, round(tokens / (LARGE[0] * LARGE[1]))))
        with sampled_memory() as memory:
            rate = measured(address, steps(run, bodies, numbers))
    return rate, memory


def small_steps() -> tuple[Rate, float]:
    """Return the rate of small steps, and the bytes of a SQLite database for each."""
    bodies = encoded_shards(*SMALL, DISTINCT)
    with tempfile.TemporaryDirectory(prefix="foreshock-ingest-") as folder, running_service(Path(folder)) as address:
        run = start_run(address, "small")
        send(address, steps(run, bodies, range(SMALL_STEPS // 2)), CONNECTIONS)
        database = Path(folder) / "foreshock-data" / "foreshock.db"
        before = database_bytes(database)
        rate = measured(address, steps(run, bodies, range(SMALL_STEPS // 2, SMALL_STEPS * 3 // 2)))
        return rate, (database_bytes(database) - before) / SMALL_STEPS


def database_bytes(path: Path) -> int:
    """Return the bytes of the tables and indexes of a SQLite database."""
    connection = sqlite3.connect(path)
    try:
        (pages,), (size,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    finally:
        connection.close()
    return int(pages) * int(size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=500e6, help="tokens of large steps (default 500e6)")
    parser.add_argument("--beside", default=BESIDE, help=f"the revision to compare with (default {BESIDE})")
    arguments = parser.parse_args()
    before, now = paired_cpu(arguments.beside)
    rate, memory = large_steps(arguments.tokens)
    small, each = small_steps()
    per_second = rate.per_second * LARGE[0] * LARGE[1]
    table = [
        (f"CPU ms, 384k tokens: {1e3 * before:.0f} before", 1e3 * now, 1e3 * before * BAR_CPU, now <= BAR_CPU * before),
        ("M tokens/s", per_second / 1e6, BAR_TOKENS / 1e6, per_second >= BAR_TOKENS),
        ("peak memory, MiB", memory.peak / 2**20, BAR_MEMORY / 2**20, memory.peak < BAR_MEMORY),
        ("memory, last third over second third", memory.growth, BAR_GROWTH, memory.growth <= BAR_GROWTH),
        ("small steps/s", small.per_second, BAR_STEPS, small.per_second >= BAR_STEPS),
        ("bytes of database a small step", each, BAR_BYTES, each <= BAR_BYTES),
    ]  # fmt: skip
    for text, value, bar, reached in table:
        print(f"{text:60}{value:>12,.2f}{bar:>12,.2f}{'' if reached else '  not reached'}")
    print(
        f"cpu_ratio={now / before:.3f} tokens_per_second={per_second:.0f} memory_mib={memory.peak / 2**20:.0f} "
        f"memory_growth={memory.growth:.3f} small_steps_per_second={small.per_second:.1f} "
        f"bytes_per_small_step={each:.0f}"
    )
    return 0 if all(reached for *_, reached in table) else 1


if __name__ == "__main__":
    sys.exit(main())
