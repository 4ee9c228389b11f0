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
import http.client
import json
import queue
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.running_service import running_service
from foreshock.rollouts import RolloutBatch, encode_rollouts

REPOSITORY = Path(__file__).resolve().parents[1]
BESIDE = "edd6602"
"""The revision before this package was halved, with the import names of today."""
BAR_CPU, BAR_TOKENS, BAR_MEMORY, BAR_GROWTH, BAR_STEPS, BAR_BYTES = 1.1, 5e6, 1 << 30, 1.1, 20.0, 20_000
LARGE, SMALL = (128, 3_000), (8, 20)
CONNECTIONS = 4
WARM_UP, WINDOW, WINDOWS = 8, 8, 9
SMALL_STEPS = 600


PARQUET = "application/vnd.apache.parquet"
JSON = "application/json"
# Distinct bodies that are sent over and over, under new step numbers.
DISTINCT = 16


@dataclass(frozen=True)
class Request:
    """The PUT of a step of one shard."""

    path: str
    body: bytes


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
            # Ids of a vocabulary: a few are frequent.
            response_token_ids=np.minimum(random.zipf(1.3, total), 32_000).astype(np.int32),
            rollout_log_probs=log_probs,
            trainer_log_probs=np.minimum(log_probs + random.normal(0.0, 0.01, total), 0.0).astype(np.float32),
            reward=random.random(rollouts).astype(np.float32),
        )
        bodies.append(encode_rollouts(batch))
    return bodies


def start_run(address: str, key: str) -> str:
    """Create a run with one attempt; return its path `/v1/runs/{id}`."""
    connection = _connect(address)
    run = json.loads(_exchange(connection, "POST", "/v1/runs", json.dumps({"key": key}).encode(), JSON))["id"]
    path = f"/v1/runs/{run}"
    _exchange(connection, "POST", f"{path}/attempts", b'{"key": "first"}', JSON)
    connection.close()
    return path


def send(address: str, requests: Iterable[Request], connections: int) -> None:
    """Send the requests in order over so many connections at a time; raises what one of them raised.

    Returns when every request is answered, so every step is committed, measured and closed.
    """
    waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    errors: list[Exception] = []
    threads = [threading.Thread(target=_send_all, args=(address, waiting, errors)) for _ in range(connections)]
    for thread in threads:
        waiting.put(None)
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _send_all(address: str, waiting: queue.SimpleQueue[Request | None], errors: list[Exception]) -> None:
    connection = _connect(address)
    try:
        while not errors and (request := waiting.get()) is not None:
            answer = _exchange(connection, "PUT", request.path, request.body, PARQUET)
            if not json.loads(answer)["step_closed"]:
                raise AssertionError(f"{request.path} did not close its step")
    except Exception as error:
        errors.append(error)
    finally:
        connection.close()


def _connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, body: bytes, media_type: str) -> bytes:
    connection.request(method, path, body, {"Content-Type": media_type})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path} was answered with {answer.status}: {text[:300]!r}")
    return text


def service_processes(folder: str = "") -> list[psutil.Process]:
    """Return the processes below this one: services and their decoders; with `folder` of the one started in it."""
    services = [each for each in psutil.Process().children() if not folder or each.cwd() == folder]
    return [process for each in services for process in (each, *each.children(recursive=True))]


def cpu_seconds(folder: str = "") -> float:
    """Return user and system time of the service's processes, with that of decoders that have been replaced."""
    return sum(sum(each.cpu_times()[:4]) for each in service_processes(folder))


def memory_bytes() -> int:
    """Return the memory of the service's processes: pages that several of them share are counted once."""
    total = 0
    for process in service_processes():
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


@dataclass
class MemorySamples:
    """Memory of the service over time, in bytes."""

    values: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Return the largest sample."""
        return max(self.values)

    @property
    def growth(self) -> float:
        """Return the peak of the last third over the peak of the second third: 1 if the memory is flat."""
        third = len(self.values) // 3
        return max(self.values[2 * third :]) / max(self.values[third : 2 * third] or self.values)


@contextmanager
def sampled_memory() -> Iterator[MemorySamples]:
    """Sample the memory of the service twice a second."""
    samples, done = MemorySamples([memory_bytes()]), threading.Event()

    def sample() -> None:
        while not done.wait(0.5):
            samples.values.append(memory_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


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
    with closing(sqlite3.connect(path)) as connection:
        (pages,), (size,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
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
