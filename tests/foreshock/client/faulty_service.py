"""An HTTP server with injected faults: it registers runs, stores requests, and answers as configured.

Tests of correct behaviour use the real service; this server is for services that are down, slow, broken or wrong.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.ports import free_port


@dataclass
class Received:
    """A request that was answered with 2xx."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


Fault = int | str | Callable[[Received], int | str | None]
"""A status to answer, "reset" (close without an answer), "half" (truncate the answer), "html", "held" (answer when
`released` is set), or a function that returns a status or None."""


@dataclass
class FaultyService:
    """A server with faults: each of `faults` applies to one request, `always` to every request after them."""

    port: int = 0
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    received: list[Received] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    requests: int = 0
    asked_at: list[float] = field(default_factory=list)
    advice: dict[str, Any] | None = None
    retry_after: str | None = None
    not_counted: int | None = None
    """The newest attempt, in the answer to a followed step that does not count; None: it counts."""

    def __post_init__(self) -> None:
        self._server: ThreadingHTTPServer | None = None
        self._advice_changed = threading.Condition()
        self.released = threading.Event()
        self._etag = 0
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FaultyService:
        service = self

        class Handler(_Handler):
            faulty = service

        ThreadingHTTPServer.allow_reuse_address = True
        self.port = self.port or free_port()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            self.released.set()
            for connection in list(self.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            with self._advice_changed:
                self._advice_changed.notify_all()

    def set_advice(self, advice: dict[str, Any]) -> None:
        with self._advice_changed:
            self.advice = advice
            self._etag += 1
            self._advice_changed.notify_all()

    def wait_for_news(self, etag: str | None, seconds: float) -> tuple[str, dict[str, Any] | None]:
        deadline = time.monotonic() + seconds
        with self._advice_changed:
            while etag == f'"{self._etag}"' and time.monotonic() < deadline and self._server is not None:
                self._advice_changed.wait(0.05)
            return f'"{self._etag}"', None if etag == f'"{self._etag}"' else self.advice

    def bodies(self, part: str) -> list[bytes]:
        return [item.body for item in self.received if part in item.path]

    def paths(self) -> list[str]:
        return [item.path for item in self.received]


@contextmanager
def faulty_service(**options: Any) -> Iterator[FaultyService]:
    service = FaultyService(**options).start()
    try:
        yield service
    finally:
        service.stop()


class _Handler(BaseHTTPRequestHandler):
    faulty: FaultyService
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.faulty.connections.add(self.connection)

    def finish(self) -> None:
        self.faulty.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass

    def _handle(self) -> None:
        service = self.faulty
        service.requests += 1
        service.asked_at.append(time.monotonic())
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the connection ended within the body, so the request was never received
            self.close_connection = True
            return
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        received = Received(self.command, parts.path, query, body, dict(self.headers))
        fault = service.faults.popleft() if service.faults else service.always
        if callable(fault):
            fault = fault(received)
        if fault is not None and self._misbehave(fault):
            return
        if parts.path.endswith("advice") and self.command == "GET":
            self._advise(received)
            return
        service.received.append(received)
        self._answer(*self._result(received))

    def _misbehave(self, fault: Fault) -> bool:
        if fault == "held":
            self.faulty.released.wait()
            return False
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "half":
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "html":
            self._answer(200, b"<html>Welcome to nginx!</html>", "text/html")
        else:
            assert isinstance(fault, int)
            problem = {"type": "about:blank", "title": "no", "status": fault, "detail": f"injected {fault}"}
            self._answer(fault, json.dumps(problem).encode(), "application/problem+json")
        return True

    def _result(self, received: Received) -> tuple[int, bytes]:
        service = self.faulty
        if received.method == "POST" and received.path == "/v1/runs":
            return 201, json.dumps({"id": "run-" + received.json()["key"]}).encode()
        if received.method == "POST" and received.path.endswith("/attempts"):
            key = received.json()["key"]
            if key not in service.attempts:
                service.attempts.append(key)
            return 201, json.dumps({"attempt": service.attempts.index(key) + 1, "key": key}).encode()
        if received.path.endswith("/follow"):
            newest = service.not_counted
            return (204, b"") if newest is None else (200, json.dumps({"newest_attempt": newest, "why": "w"}).encode())
        return (201 if received.method == "PUT" else 200), b'{"status": "stored"}'

    def _advise(self, received: Received) -> None:
        etag = received.headers.get("If-None-Match")
        new, advice = self.faulty.wait_for_news(etag, float(received.query.get("wait", "0")))
        self.faulty.received.append(received)
        if advice is None:
            self._answer(304 if etag else 404, b"", etag=new)
        else:
            self._answer(200, json.dumps(advice).encode(), etag=new)

    def _answer(self, status: int, body: bytes, kind: str = "application/json", etag: str | None = None) -> None:
        self.send_response(status)
        if status != 304:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        if etag is not None:
            self.send_header("ETag", etag)
        if self.faulty.retry_after is not None and status in (429, 503):
            self.send_header("Retry-After", self.faulty.retry_after)
        self.end_headers()
        if status != 304:
            self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = _handle  # noqa: N815
