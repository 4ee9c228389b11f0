"""How soon do long-polling trainers get a change of the advice? `python -m benchmarks.queries long_polls`.

1,000 connections poll the advice of one run with `wait=30` and poll again after each answer, as trainers do. A change
is an operator's hold or release, sent to one service process; its latency is from the moment the POST is sent to the
answer that a trainer receives. `/livez` is asked every 50 ms meanwhile, on a connection of its own.

Two set-ups: one process on SQLite, and two processes on one PostgreSQL, half of the trainers on each. There the
change is always sent to the first, so the second hears of it from the database. The trainers are one process of this
benchmark, which shares the two cores with the services and the database.

Bars: a change reaches 99 % of the trainers within 1 s in both set-ups, and of each process; 99 % of the answers of
`/livez` come within 100 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np

from benchmarks.queries.bar import Bar
from benchmarks.running_service import running_service
from tests.service.postgres import PostgresCluster

BAR_CHANGE_SECONDS, BAR_LIVEZ_SECONDS = 1.0, 0.1
TRAINERS = 1_000
CHANGES = 12
WAIT_SECONDS = 30
# Trainers connect one after the other; between two changes all of them poll again.
CONNECT_EVERY_SECONDS = 0.005
SETTLE_SECONDS = 4.0
LIVEZ_EVERY_SECONDS = 0.05
_LENGTH, _ETAG = re.compile(rb"(?i)content-length: (\d+)"), re.compile(rb"(?i)etag: (\S+)")
_REVISION = re.compile(rb'"revision": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured in one set-up, in seconds."""

    name: str
    # Of each process: a value for each change and trainer.
    change: dict[str, list[float]]
    livez: list[float]

    @property
    def change_p99(self) -> float:
        """Return the 99th percentile of the slowest process."""
        return max(float(np.percentile(values, 99)) for values in self.change.values())

    @property
    def livez_p99(self) -> float:
        """Return the 99th percentile of `/livez` over all processes."""
        return float(np.percentile(self.livez, 99))

    @property
    def holds(self) -> bool:
        """Return whether the bars are reached."""
        return self.change_p99 <= BAR_CHANGE_SECONDS and self.livez_p99 <= BAR_LIVEZ_SECONDS


class Trainer(asyncio.Protocol):
    """One connection that polls the advice again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None
        self.answers: list[tuple[float, int]] = []
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the advice."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._ask("", "")

    def data_received(self, data: bytes) -> None:
        """Note an answer, then wait for the next one."""
        at = time.perf_counter()
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < int((_LENGTH.search(head) or [b"", b"0"])[1]):
            return
        self._received = b""
        if head[9:12] == b"200":
            self.answers.append((at, int(_REVISION.search(body)[1])))  # type: ignore[index]
        elif head[9:12] != b"304":
            self.failure = f"{head!r} {body!r}"
            return
        self._ask(f"&wait={WAIT_SECONDS}", f"If-None-Match: {_ETAG.search(head)[1].decode()}\r\n")  # type: ignore[index]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection ended."""
        self.failure = self.failure or f"the connection ended: {exc}"

    def _ask(self, parameters: str, headers: str) -> None:
        assert self._transport is not None
        self._transport.write(f"GET {self._path}{parameters} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode())


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(address)
    return await asyncio.open_connection(url.host, url.port)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    status = int(first.split()[1])
    body = await reader.readexactly(int(headers.get("content-length", 0))) if status != 304 else b""
    return status, headers, body


async def _watch_livez(address: str, seconds: list[float]) -> None:
    reader, writer = await _connect(address)
    while True:
        begin = time.perf_counter()
        writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await _answer(reader)
        seconds.append(time.perf_counter() - begin)
        await asyncio.sleep(LIVEZ_EVERY_SECONDS)


@asynccontextmanager
async def _running(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _measure(name: str, addresses: list[str], run: str, trainers: int, changes: int) -> Figures:
    path = f"/v1/runs/{run}/lr-advice?step=1"
    figures = Figures(name, {address: [] for address in addresses}, [])
    polling: list[tuple[str, Trainer]] = []
    loop = asyncio.get_running_loop()
    for number in range(trainers):
        url = httpx.URL(addresses[number % len(addresses)])
        _, trainer = await loop.create_connection(partial(Trainer, path), url.host, url.port or 80)
        polling.append((addresses[number % len(addresses)], trainer))
        await asyncio.sleep(CONNECT_EVERY_SECONDS)
    await asyncio.sleep(SETTLE_SECONDS)
    livez = [_watch_livez(address, figures.livez) for address in addresses]
    async with _running(*livez) as watching, httpx.AsyncClient(timeout=60) as http:
        for number in range(changes):
            for _, trainer in polling:
                trainer.answers.clear()
            body = {"kind": "release" if number % 2 else "hold", "reason": "benchmark"}
            begin = time.perf_counter()
            answer = await http.post(f"{addresses[0]}/v1/runs/{run}/lr-advice/decisions", json=body)
            revision = answer.raise_for_status().json()["revision"]
            for address, trainer in polling:
                figures.change[address].append(await _heard(trainer, revision, begin))
            await asyncio.sleep(SETTLE_SECONDS)
        assert not any(task.done() for task in watching), "a request for /livez failed"
    return figures


async def _heard(trainer: Trainer, revision: int, begin: float) -> float:
    while time.perf_counter() < begin + 60:
        for at, got in trainer.answers:
            if got >= revision:
                return at - begin
        assert not trainer.failure, trainer.failure
        await asyncio.sleep(0.02)
    return float("inf")


def _new_run(address: str) -> str:
    with httpx.Client(base_url=address, timeout=60) as http:
        run: str = http.post("/v1/runs", json={"key": "polled", "advice_mode": "apply"}).raise_for_status().json()["id"]
        http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}).raise_for_status()
    return run


@contextlib.contextmanager
def _services(folder: Path, cluster: PostgresCluster | None) -> Iterator[list[str]]:
    with ExitStack() as stack:
        addresses = []
        for number in range(1 if cluster is None else 2):
            own = folder / f"service{number}"
            own.mkdir()
            settings = {"FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}
            if cluster is not None:
                settings |= {
                    "FORESHOCK_DATABASE_URL": cluster.url("foreshock_1"),
                    "FORESHOCK_STORE_URL": str(folder / "tokens"),
                }
            addresses.append(stack.enter_context(running_service(own, **settings)))
        yield addresses


def measure_set_ups(trainers: int = TRAINERS, changes: int = CHANGES) -> list[Figures]:
    """Return the figures of both set-ups."""
    measured = []
    with tempfile.TemporaryDirectory(prefix="fsk-polls-") as folder, _services(Path(folder), None) as addresses:
        run = _new_run(addresses[0])
        measured.append(asyncio.run(_measure("sqlite, 1 process", addresses, run, trainers, changes)))
    with tempfile.TemporaryDirectory(prefix="fsk-polls-") as folder:
        cluster_folder = Path(tempfile.mkdtemp(prefix="fsk-pg-", dir="/tmp"))
        cluster = PostgresCluster(cluster_folder, durable=True)
        try:
            cluster.new_database()
            with _services(Path(folder), cluster) as addresses:
                run = _new_run(addresses[0])
                measured.append(asyncio.run(_measure("postgresql, 2 processes", addresses, run, trainers, changes)))
        finally:
            cluster.stop()
    return measured


def measure() -> Bar:
    """Measure both set-ups."""
    measured = measure_set_ups()
    lines = [
        f"long polls: {TRAINERS} trainers, {CHANGES} changes; seconds from the change to the answer, and of /livez",
        f"{'':26}{'p50':>8}{'p99':>8}{'max':>8}{'livez p99':>12}{'livez max':>12}",
    ]
    for figures in measured:
        for number, values in enumerate(figures.change.values(), start=1):
            percentiles = "".join(f"{float(np.percentile(values, share)):8.3f}" for share in (50, 99, 100))
            livez = f"{figures.livez_p99:12.3f}{max(figures.livez):12.3f}"
            lines.append(f"{figures.name + f' ({number})':26}{percentiles}{livez}")
    pairs = {
        "long_polls_sqlite_change_p99_s": measured[0].change_p99,
        "long_polls_postgresql_change_p99_s": measured[1].change_p99,
        "long_polls_livez_p99_s": max(figures.livez_p99 for figures in measured),
    }
    return Bar("long polls", lines, pairs, all(figures.holds for figures in measured))
