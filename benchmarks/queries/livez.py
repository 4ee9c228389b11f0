"""Bar: `/livez` answers within 100 ms at p99, whatever else the service is asked.

Each load is made by processes of its own for SECONDS on one service with SQLite, while `/livez` is asked every 20 ms:
uploads that stall, a run with a million scalars, headers without an end, shards at full speed, and
accelerators that workers invent. The loads share the two cores with the service. The largest memory of the service's
own process, without its decoders, is shown beside it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import multiprocessing
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.queries.bar import Bar
from benchmarks.queries.filled_database import DATABASE, start_runs
from benchmarks.queries.scrape import serving_process
from benchmarks.queries.uploads import PARQUET, encoded_batch
from benchmarks.running_service import running_service
from foreshock.scorers import REFERENCE

BAR_SECONDS = 0.1
SECONDS, EVERY_SECONDS, SETTLE_SECONDS = 12.0, 0.02, 1.0
STALLED_UPLOADS = 60
SCALARS, SCALAR_STEPS = 200, 5_000
# Of so many the values are just within FORESHOCK_MAX_ANSWER_VALUES; all of them are refused.
READ_SCALARS = 75
INVENTED_ACCELERATORS = 600

Load = Callable[[str, str], None]
"""A load without an end: of a service's address and a run."""


def stalled_uploads(url: str, run: str) -> None:
    """Hold uploads open that send a byte now and then."""
    connections = [_connected(url) for _ in range(STALLED_UPLOADS)]
    for step, connection in enumerate(connections):
        head = f"PUT /v1/runs/{run}/steps/{step}/rollouts/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {PARQUET}\r\n"
        connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode())
    while True:
        for connection in connections:
            # Those that have no place were refused.
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * 2_000)
        time.sleep(0.2)


def read_scalars(url: str, run: str) -> None:
    """Read the most scalars of the run that one answer may have, and all of them thinned out, again and again."""
    some = {"name": [f"metric/{number}" for number in range(READ_SCALARS)]}
    with httpx.Client(base_url=url, timeout=600) as client:
        while True:
            client.get(f"/v1/runs/{run}/scalars", params=some).raise_for_status()
            client.get(f"/v1/runs/{run}/scalars", params={"max_points": 1_000}).raise_for_status()


def endless_headers(url: str, _run: str) -> None:
    """Send headers until the service closes the connection, again and again."""
    while True:
        with _connected(url) as connection, contextlib.suppress(OSError):
            connection.sendall(b"GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
            for _ in range(1_000):
                connection.sendall(b"a" * 65_536)


def full_shards(url: str, run: str) -> None:
    """Upload shards of 384,000 tokens as fast as they are taken."""
    body, first = encoded_batch(128, 3_000), multiprocessing.current_process().pid or 0
    with httpx.Client(base_url=url, timeout=600) as client:
        for step in itertools.count(1_000 * (first % 1_000_000)):
            answer = client.put(
                f"/v1/runs/{run}/steps/{step}/rollouts/0", content=body, headers={"Content-Type": PARQUET}
            )
            answer.raise_for_status()


def invented_accelerators(url: str, _run: str) -> None:
    """Ask for jobs as workers of accelerators that nobody declared, and read what lists them."""
    with httpx.Client(base_url=url, timeout=600) as client:
        for number in itertools.count():
            name = f"invented-{number % INVENTED_ACCELERATORS}"
            worker = {"worker": f"w-{name}", "accelerator": name, "device_name": name, "scorers": [REFERENCE]}
            client.post("/v1/leases", json=worker).raise_for_status()
            if number % 50 == 0:
                client.get("/v1/hardware").raise_for_status()
                client.get("/metrics").raise_for_status()


LOADS: dict[str, tuple[Load, int]] = {
    f"{STALLED_UPLOADS} stalled uploads": (stalled_uploads, 1),
    f"{SCALARS} scalars × {SCALAR_STEPS:,} steps, 4 readers": (read_scalars, 4),
    "headers without an end, 4 senders": (endless_headers, 4),
    "shards of 384,000 tokens, 4 senders": (full_shards, 4),
    f"{INVENTED_ACCELERATORS} invented accelerators": (invented_accelerators, 2),
}


def measure() -> Bar:
    """Ask for `/livez` under each load."""
    lines, values, worst = ["/livez, seconds, and memory of the service under a load"], {}, 0.0
    lines.append(f"  {'':42} {'p50':>7} {'p99':>7} {'max':>7} {'MiB':>6} {'answers':>8}")
    with tempfile.TemporaryDirectory(prefix="foreshock-livez-") as name:
        folder = Path(name)
        with running_service(folder) as url, httpx.Client(base_url=url, timeout=600) as client:
            run, *_ = start_runs(client, 1, "loaded")
            _fill_scalars(folder, run)
            for title, (load, processes) in LOADS.items():
                with _under(load, processes, url, run):
                    time.sleep(SETTLE_SECONDS)
                    seconds, peak = _asked(url)
                p50, p99 = (float(np.percentile(seconds, each)) for each in (50, 99))
                worst = max(worst, p99)
                lines.append(
                    f"  {title:42} {p50:7.3f} {p99:7.3f} {max(seconds):7.3f} {peak / 2**20:6.0f} {len(seconds):8,d}"
                )
                values[f"livez_{load.__name__}_p99_s"] = p99
                values[f"livez_{load.__name__}_mib"] = peak / 2**20
    return Bar("livez", lines, values, reached=worst <= BAR_SECONDS)


def _asked(url: str) -> tuple[list[float], int]:
    """Return the seconds of each answer, and the largest memory of the service's process."""
    process = serving_process(url)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    seconds, peak, end = [], 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        begin = time.perf_counter()
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.perf_counter() - begin)
        if answer.status != 200:
            raise RuntimeError(f"/livez was answered with {answer.status}")
        if len(seconds) % 25 == 0:
            peak = max(peak, process.memory_info().rss)
        time.sleep(EVERY_SECONDS)
    connection.close()
    return seconds, peak


@contextmanager
def _under(load: Load, processes: int, url: str, run: str) -> Iterator[None]:
    """Keep the load up during the block; raises RuntimeError if a process of it ended."""
    spawning = multiprocessing.get_context("spawn")
    senders = [spawning.Process(target=load, args=(url, run), daemon=True) for _ in range(processes)]
    for sender in senders:
        sender.start()
    try:
        yield
        if not all(sender.is_alive() for sender in senders):
            raise RuntimeError(f"a process of {load.__name__} ended: what it measured is without load")
    finally:
        for sender in senders:
            sender.terminate()
            sender.join()


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=60)


def _fill_scalars(folder: Path, run: str) -> None:
    """Give the run a million scalars by SQL."""
    rows = (
        (run, 1, step, "trainer", f"metric/{number}", 0.1 + 1e-3 * ((step * (number + 3)) % 997), step)
        for step in range(SCALAR_STEPS)
        for number in range(SCALARS)
    )
    with contextlib.closing(sqlite3.connect(folder / DATABASE, timeout=60)) as database, database:
        database.executemany(
            "INSERT INTO scalars (run_id, attempt, step, source, name, value, received_at_us)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
