"""How fast does the service ingest, beside an earlier revision? `make bench-ingest`.

The service is the real one, in its own processes, on the same cores as the load generator; bodies are encoded
beforehand and sent over a few connections. A window ends when all that follows from its requests is worked out.

1. CPU time of a step of 128 rollouts × 3,000 tokens, here and at the revision BESIDE, in alternating windows.
2. Tokens per second of such steps, and the memory of all processes of the service while `--tokens` are ingested.
3. Small steps (8 rollouts × 20 tokens) per second, and bytes of database a step.
4. CPU time of a step that has scalars only, back to back and 60 ms apart; less idle time.

Bars: 1.1 × the CPU; 5 M tokens/s, memory below 1 GiB and flat; 20 small steps/s; 20 kB of database a small step; 7 ms
of CPU for scalars back to back.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.bars import Line, report
from benchmarks.running_service import service, wait_until_advanced
from foreshock.rollouts import RolloutBatch, encode_rollouts
from tests.paths import REPOSITORY
from tests.service.sending import Sender, start_run

BESIDE = "edd6602"
"""The revision before this package was halved, with the import names of today."""
BAR_CPU, BAR_TOKENS, BAR_MEMORY, BAR_GROWTH, BAR_STEPS, BAR_BYTES = 1.1, 5e6, 1024.0, 1.1, 20.0, 20_000
LARGE, SMALL = (128, 3_000), (8, 20)
CONNECTIONS = 4
WARM_UP, WINDOW, WINDOWS = 8, 8, 9
SMALL_STEPS = 600
SCALAR_STEPS, BAR_SCALARS = 200, 7.0
# Number of distinct bodies, which are sent repeatedly under new step numbers.
DISTINCT = 16


def encoded_shards(rollouts: int, tokens: int, count: int) -> list[bytes]:
    """Return `count` different bodies of `rollouts` × `tokens` response tokens with two log-probs and a reward."""
    random = np.random.default_rng(rollouts * tokens)
    total = rollouts * tokens
    bodies = []
    for _ in range(count):
        log_probs = -random.exponential(0.5, total).astype(np.float32)
        batch = RolloutBatch.from_arrays(
            [f"rollout-{number}" for number in range(rollouts)],
            prompt_offsets=np.arange(rollouts + 1),
            prompt_token_ids=random.integers(0, 32_000, rollouts),
            response_offsets=np.arange(rollouts + 1) * tokens,
            # Few ids of a vocabulary are frequent.
            response_token_ids=np.minimum(random.zipf(1.3, total), 32_000).astype(np.int32),
            rollout_log_probs=log_probs,
            trainer_log_probs=np.minimum(log_probs + random.normal(0.0, 0.01, total), 0.0).astype(np.float32),
            reward=random.random(rollouts).astype(np.float32),
        )
        bodies.append(encode_rollouts(batch))
    return bodies


def put_step(run: Sender, step: int, body: bytes) -> float:
    """Upload a step of one shard, which closes it; return the seconds."""
    begin = time.perf_counter()
    run.put_shard(step, body).raise_for_status()
    return time.perf_counter() - begin


def send_steps(run: Sender, bodies: Sequence[bytes], numbers: range) -> None:
    """Upload the steps in order, a few at a time, and wait until all that follows from them is worked out."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lambda step: put_step(run, step, bodies[step % len(bodies)]), numbers))
    wait_until_advanced(run.http, run.run)


def service_processes(folder: str = "") -> list[psutil.Process]:
    """Return the child processes: services and their decoders; with `folder`, only of the service started in it."""
    services = [each for each in psutil.Process().children() if not folder or each.cwd() == folder]
    return [process for each in services for process in (each, *each.children(recursive=True))]


def cpu_seconds(folder: str = "") -> float:
    """Return user and system time of the service's processes, including decoders that have been replaced."""
    return sum(sum(each.cpu_times()[:4]) for each in service_processes(folder))


def memory_bytes() -> int:
    """Return the memory of the service's processes; pages that they share are counted once."""
    total = 0
    for process in service_processes():
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


@contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """Sample the memory of the service twice a second, in bytes."""
    samples, done = [memory_bytes()], threading.Event()

    def sample() -> None:
        while not done.wait(0.5):
            samples.append(memory_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def growth(samples: Sequence[int]) -> float:
    """Return the peak of the last third over the peak of the second third: 1 if the memory is flat."""
    third = len(samples) // 3
    return max(samples[2 * third :]) / max(samples[third : 2 * third] or samples)


def measured(run: Sender, bodies: Sequence[bytes], numbers: range, parent: str = "") -> tuple[float, float]:
    """Upload the steps; return steps per second and CPU seconds per step. `parent` limits the CPU to one service."""
    cpu, begin = cpu_seconds(parent), time.perf_counter()
    send_steps(run, bodies, numbers)
    seconds = time.perf_counter() - begin
    return len(numbers) / seconds, (cpu_seconds(parent) - cpu) / len(numbers)


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


def _packages_of(tree: Path) -> str:
    """Return the PYTHONPATH of a tree; an earlier one has the service's package at its top, by a link."""
    folder = tree / "service"
    return f"{tree}{os.pathsep}{folder}" if (folder / "foreshock_service").is_dir() else str(tree)


def paired_cpu(revision: str) -> tuple[float, float]:
    """Return the CPU seconds of a large step, at the revision and here: medians of alternating windows."""
    bodies = encoded_shards(*LARGE, 4)
    found: dict[str, list[float]] = {"before": [], "now": []}
    with checkout(revision) as tree, ExitStack() as stack:
        runs = {}
        for name, source in (("before", tree), ("now", REPOSITORY)):
            folder, http = stack.enter_context(service(PYTHONPATH=_packages_of(source)))
            runs[name] = (start_run(http, "large"), str(folder))
        for window in range(WINDOWS + 1):
            numbers = range(window * WINDOW, (window + 1) * WINDOW)
            for name in sorted(runs, reverse=bool(window % 2)):
                run, folder_name = runs[name]
                _, cpu = measured(run, bodies, numbers, folder_name)
                if window:  # the first one warms up
                    found[name].append(cpu)
    return median(found["before"]), median(found["now"])


def large_steps(tokens: float) -> tuple[float, list[int]]:
    """Ingest `tokens` in large steps; return tokens per second and samples of the memory."""
    bodies = encoded_shards(*LARGE, 4)
    with service() as (_, http):
        run = start_run(http, "large")
        send_steps(run, bodies, range(WARM_UP))
        numbers = range(WARM_UP, WARM_UP + max(WARM_UP, round(tokens / (LARGE[0] * LARGE[1]))))
        with sampled_memory() as memory:
            per_second, _ = measured(run, bodies, numbers)
    return per_second * LARGE[0] * LARGE[1], memory


def small_steps() -> tuple[float, float]:
    """Return small steps per second, and bytes of a SQLite database per step."""
    bodies = encoded_shards(*SMALL, DISTINCT)
    with service() as (folder, http):
        run = start_run(http, "small")
        send_steps(run, bodies, range(SMALL_STEPS // 2))
        database = folder / "foreshock-data" / "foreshock.db"
        before = database_bytes(database)
        per_second, _ = measured(run, bodies, range(SMALL_STEPS // 2, SMALL_STEPS * 3 // 2))
        return per_second, (database_bytes(database) - before) / SMALL_STEPS


def scalar_steps(pauses: Sequence[float]) -> list[float]:
    """Return the CPU of a step of scalars in ms, for each pause between steps in seconds."""
    found = []
    with service() as (_, http):
        run = start_run(http, "scalars")
        put_scalars(run, range(SCALAR_STEPS // 4), 0.0)
        time.sleep(1.0)
        cpu = cpu_seconds()
        time.sleep(5.0)
        idle = (cpu_seconds() - cpu) / 5.0
        for number, pause in enumerate(pauses, 1):
            cpu, begin = cpu_seconds(), time.perf_counter()
            put_scalars(run, range(number * SCALAR_STEPS, (number + 1) * SCALAR_STEPS), pause)
            cpu = cpu_seconds() - cpu - idle * (time.perf_counter() - begin)
            found.append(1e3 * cpu / SCALAR_STEPS)
    return found


def put_scalars(run: Sender, numbers: range, pause: float) -> None:
    for step in numbers:
        values: dict[str, float | None] = {
            "reward": 0.5 + step % 7 / 1e3,
            "response_length": 100.0 + step % 5,
            "k3_kl": 1e-4,
            "entropy": 1.0,
        }
        run.put_scalars(step, values).raise_for_status()
        time.sleep(pause)
    wait_until_advanced(run.http, run.run)


def database_bytes(path: Path) -> int:
    """Return the bytes of the tables and indexes of a SQLite database."""
    with closing(sqlite3.connect(path)) as connection:
        (pages,), (size,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages) * int(size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=500e6, help="tokens of large steps (default 500e6)")
    parser.add_argument("--beside", default=BESIDE, help=f"the revision to compare with (default {BESIDE})")
    arguments = parser.parse_args()
    before, now = paired_cpu(arguments.beside)
    per_second, memory = large_steps(arguments.tokens)
    small, each = small_steps()
    together, apart = scalar_steps((0.0, 0.06))
    return report(
        [
            Line("cpu_ratio", f"CPU of 384k tokens, × {1e3 * before:.0f} ms before", now / before, BAR_CPU),
            Line("tokens_per_second", "tokens/s", per_second, BAR_TOKENS, at_least=True),
            Line("memory_mib", "peak memory, MiB", max(memory) / 2**20, BAR_MEMORY),
            Line("memory_growth", "memory, last third over second third", growth(memory), BAR_GROWTH),
            Line("small_steps_per_second", "small steps/s", small, BAR_STEPS, at_least=True),
            Line("bytes_per_small_step", "bytes of database a small step", each, BAR_BYTES),
            Line("scalars_cpu_ms", "CPU of a step of scalars, ms", together, BAR_SCALARS),
            Line("scalars_apart_cpu_ms", "… 60 ms apart, ms", apart),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
