"""Does a broken service harm the trainer that logs to it? `make bench-broken-service`.

For each kind of broken service, and for 1, 3 and 8 clients, a trainer process logs 200 sets of scalars and 20 shards of
each client, waits two seconds for the background to meet the service, and ends. Bars: the median call takes less than
1 ms, resident memory grows by at most 64 MiB beyond a trainer whose service is away, and the process ends within
`exit_seconds` of its last line (and half a second of the interpreter's own).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

from benchmarks.bars import Line, report

CLIENTS = (1, 3, 8)
EXIT_SECONDS, OWN_EXIT_SECONDS = 3.0, 0.5
MOST_CALL_SECONDS, MOST_GROWTH_BYTES = 1e-3, 64 << 20
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_NO = b'{"detail": "no"}'


def _answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    head = [b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def _endless(first: bytes, piece: bytes) -> Iterator[bytes]:
    return chain([first], repeat(piece))


def _slow(first: bytes, data: bytes) -> Iterator[bytes]:
    yield first
    for byte in data:
        yield bytes([byte])
        time.sleep(0.05)


def _pauses(first: bytes) -> Iterator[bytes]:
    yield first
    while True:
        time.sleep(1)
        yield b""


_CHUNK = b"10000\r\n" + b" " * 65_536 + b"\r\n"
# 1 GiB of zeros in 1 MB and one member: a piece that ends with a full flush may be repeated. Only the checksum, which
# comes last, is wrong.
_DEFLATE = zlib.compressobj(9, wbits=-15)
_ZEROS = _DEFLATE.compress(bytes(1 << 20)) + _DEFLATE.flush(zlib.Z_FULL_FLUSH)
_GZIP = gzip.compress(b"")[:10] + _ZEROS * 1024 + gzip.compress(b"")[10:]
_CREATED = {"id": "run_1", "attempt": 1}


def _json(**changed: object) -> bytes:
    return _answer(json.dumps(_CREATED | changed).encode())


Kind = Callable[[], Iterator[bytes] | bytes | None]
"""What is sent for each request: bytes, pieces without an end, or nothing at all (None)."""

_REFUSALS = ("401", "403", "404", "409", "413", "422", "500")

KINDS: dict[str, Kind] = {
    "silent": lambda: None,
    "closes": lambda: b"",
    "half of the headers": lambda: _pauses(_OK),
    "headers a byte at a time": lambda: _slow(b"", _OK * 1000),
    "headers without an end": lambda: _endless(_OK, b"X-A: " + b"a" * 1000 + b"\r\n"),
    "1xx without an end": lambda: _endless(b"", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 100),
    "chunks without an end": lambda: _endless(_OK + b"Transfer-Encoding: chunked\r\n\r\n", _CHUNK),
    "chunks of a byte": lambda: _endless(_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 1000),
    "body without an end": lambda: _endless(_OK + b"\r\n", b" " * 65_536),
    "body of an exabyte": lambda: _endless(_OK + b"Content-Length: 999999999999999999\r\n\r\n", b"[" * 65_536),
    "body a byte at a time": lambda: _slow(_OK + b"Content-Length: 99999\r\n\r\n", b" " * 99_999),
    "gzip bomb": lambda: _answer(_GZIP, b"Content-Encoding: gzip"),
    "gzip bomb as an error": lambda: _answer(_GZIP, b"Content-Encoding: gzip", status=b"503 X"),
    "deflate": lambda: _answer(zlib.compress(bytes(100 << 20)), b"Content-Encoding: deflate"),
    "unknown encoding": lambda: _answer(b"{}", b"Content-Encoding: rot13"),
    "gzip of many layers": lambda: _answer(gzip.compress(_GZIP), b"Content-Encoding: gzip, gzip"),
    "nested JSON": lambda: _answer(b"[" * 500_000),
    "empty lists": lambda: _answer(b"[" + b"[]," * 300_000 + b"[]]"),
    "digits": lambda: _answer(b"9" * 500_000),
    "NaN": lambda: _answer(b'{"id": NaN, "attempt": Infinity}'),
    "no UTF-8": lambda: _answer(b'{"id": "\xff\xfe"}'),
    "unknown charset": lambda: _answer(b"<html>", b"Content-Type: text/html; charset=rot13", status=b"500 X"),
    "HTML": lambda: _answer(b"<html>welcome</html>"),
    "empty": lambda: _answer(b""),
    "204": lambda: b"HTTP/1.1 204 No Content\r\n\r\n",
    "101": lambda: b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "redirect": lambda: _answer(_NO, b"Location: http://127.0.0.1:1/", status=b"307 X"),
    **{each: partial(_answer, _NO, status=f"{each} X".encode()) for each in _REFUSALS},
    "429 for ever": lambda: _answer(_NO, b"Retry-After: " + b"9" * 400, status=b"429 X"),
    "429 with no number": lambda: _answer(_NO, b"Retry-After: \xb2", status=b"429 X"),
    "503 until the year 9999": lambda: _answer(_NO, b"Retry-After: Fri, 31 Dec 9999 23:59:59 GMT", status=b"503 X"),
    "long detail": lambda: _answer(json.dumps({"detail": "\x1b[2J\n" * 100_000}).encode(), status=b"503 X"),
    "id is a path": lambda: _json(id="../../other"),
    "id is null": lambda: _json(id=None),
    "id is a megabyte": lambda: _json(id="r" * 500_000),
    "attempt is no number": lambda: _json(attempt="x"),
    "attempt is huge": lambda: _json(attempt=10**300),
    "cut in the body": lambda: _OK + b"Content-Length: 100\r\n\r\n{",
    "more than its length": lambda: _answer(b"{}") + b"garbage" * 100,
    "no HTTP": lambda: b"SSH-2.0-OpenSSH_9.6\r\n",
    "noise": lambda: bytes(range(256)) * 16,
    "takes everything": lambda: _json(),
}


def serve(kind: str, tls: ssl.SSLContext | None = None) -> tuple[socket.socket, str]:
    """Serve broken answers on a free port, in threads, over TLS if there is a context."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.settimeout(600)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_serve_connection, args=(connection, KINDS[kind], tls), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener, f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"


def _serve_connection(connection: socket.socket, kind: Kind, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError):
        connection = connection if tls is None else tls.wrap_socket(connection, server_side=True)
    with connection:
        try:
            while connection.recv(1 << 20):
                made = kind()
                if made is None:
                    time.sleep(60)
                elif isinstance(made, bytes):
                    connection.sendall(made)
                    if not made.startswith(b"HTTP") or b"\r\n\r\n" not in made:
                        return
                else:
                    for piece in made:
                        connection.sendall(piece)
        except OSError:
            return


class Outcome(NamedTuple):
    """The result of one trainer: median seconds per call, bytes of memory growth, seconds until its end."""

    kind: str
    clients: int
    call: float
    growth: int
    exit: float
    status: int


def run_trainer(kind: str, clients: int) -> Outcome:
    """Run a trainer against a kind of broken service."""
    listener, url = serve(kind) if kind in KINDS else (None, "http://127.0.0.1:9")
    with tempfile.TemporaryDirectory() as spool:
        command = [sys.executable, "-m", "benchmarks.broken_service", "--trainer", url, spool, str(clients)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        begin = time.monotonic()
        try:
            status = process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        seconds = time.monotonic() - begin
    if listener is not None:
        listener.close()
    call, growth = json.loads(line) if line else (float("inf"), 1 << 40)
    return Outcome(kind, clients, call, growth, seconds, status)


def trainer(url: str, spool: str, count: int) -> None:
    """Log as a trainer does, print the median call and the growth of memory, and end."""
    import numpy as np
    import psutil

    from foreshock import Client

    process = psutil.Process()
    tokens = np.arange(4096, dtype=np.int32)
    batch = {
        "prompt_token_ids": tokens[:256], "prompt_offsets": np.arange(0, 257, 64), "response_token_ids": tokens,
        "response_offsets": np.arange(0, 4097, 1024), "rollout_log_probs": np.full(4096, -0.5, np.float32),
        "trainer_log_probs": np.full(4096, -0.5, np.float32),
    }  # fmt: skip
    first = Client("http://127.0.0.1:9", run_key="first", spool_directory=spool + "/first", exit_seconds=0.1)
    first.log_rollouts(0, batch)
    first.log_scalars(0, {"a": 1.0})
    time.sleep(0.3)
    before = process.memory_info().rss
    logged = [
        Client(
            url, run_key=f"run-{each}", spool_directory=f"{spool}/{each}", exit_seconds=EXIT_SECONDS, timeout_seconds=5
        )
        for each in range(count)
    ]
    seconds: list[float] = []
    for step in range(200):
        for client in logged:
            begin = time.perf_counter()
            client.log_scalars(step, {"grad_norm": 1.0, "entropy": float(np.sin(step))})
            seconds.append(time.perf_counter() - begin)
            if step % 10 == 0:
                client.log_rollouts(step, batch)
        time.sleep(0.002)
    peak = before
    for _ in range(20):
        time.sleep(0.1)
        peak = max(peak, process.memory_info().rss)
    print(json.dumps([statistics.median(seconds), peak - before]), flush=True)


def main() -> int:
    """Run every kind with every number of clients; print a table and return 1 if a bar is not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="", help="only those with this text in their name")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.trainer:
        trainer(arguments.trainer[0], arguments.trainer[1], int(arguments.trainer[2]))
        return 0
    kinds = [each for each in (*KINDS, "nobody listens") if arguments.kinds in each]
    asked = [(kind, clients) for kind in kinds for clients in arguments.clients]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        outcomes: list[Outcome] = []
        for each in pool.map(lambda each: run_trainer(*each), asked):
            outcomes.append(each)
            print(
                f"{each.kind:26} {each.clients} clients: call {each.call * 1e6:6.0f} µs, memory "
                f"+{each.growth / 2**20:5.1f} MiB, exit {each.exit:5.2f} s, status {each.status}",
                flush=True,
            )
    return report(
        [
            Line("call_us", "a call, µs", max(each.call for each in outcomes) * 1e6, MOST_CALL_SECONDS * 1e6),
            Line("growth_mib", "memory, MiB", max(each.growth for each in outcomes) / 2**20, MOST_GROWTH_BYTES / 2**20),
            Line("exit_s", "exit, s", max(each.exit for each in outcomes), EXIT_SECONDS + OWN_EXIT_SECONDS),
            Line("failed", "trainers that failed", sum(each.status != 0 for each in outcomes), 0),
        ],
        kinds=len(kinds),
        trainers=len(outcomes),
    )


if __name__ == "__main__":
    sys.exit(main())
