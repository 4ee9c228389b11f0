"""Requests as bytes: headers are bounded, slow ones delay nobody, what is no HTTP is refused. What a start prints."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from foreshock_service import serving
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.health import resident_bytes
from foreshock_service.platform.request_guards import MOST_HEADER_BYTES
from foreshock_service.platform.security import Scope
from tests.service import receiving
from tests.service.keys import make_key
from tests.service.operation.processes import answer_of
from tests.service.server import RunningServer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

MEBIBYTE = 1 << 20
BEGIN = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def test_start_prints_what_it_waits_for(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter(["starting", "starting", "ok"])

    class Readiness(receiving.QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            body = json.dumps({"checks": {"token_store": "ok", "decoders": next(states)}}).encode()
            self.answer(503, body)

    monkeypatch.setattr(serving, "_READY_POLL_SECONDS", 0.01)
    with receiving.serving(Readiness) as url:
        serving._report_listening("127.0.0.1", int(url.rpartition(":")[2]))
    listens, ready = capsys.readouterr().out.splitlines()
    assert listens == f"Foreshock listens on {url}, not ready yet (decoders: starting)"
    assert ready == "Foreshock is ready"
    assert next(states, None) is None


@pytest.mark.parametrize("scheme", ["https", "http", None])
def test_session_behind_a_tls_proxy_is_for_tls_only(
    server: RunningServer, database: Database, scheme: str | None
) -> None:
    """The proxy is another container: uvicorn takes the scheme from a proxy on its own machine only."""
    _, key = make_key(database, Scope.READ)
    headers = {"Host": "localhost", "Origin": f"{scheme or 'http'}://localhost"}
    headers |= {} if scheme is None else {"X-Forwarded-Proto": scheme}
    with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), base_url=server.url) as client:
        form = {"api_key": key["Authorization"].removeprefix("Bearer ")}
        answer = client.post("/login", data=form, headers=headers)
    assert answer.status_code == 303
    cookie = {part.strip() for part in answer.headers["set-cookie"].split(";")}
    assert ("Secure" in cookie) == (scheme == "https")


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def send_until_refused(connection: socket.socket, piece: bytes, most_bytes: int) -> int:
    """Send pieces until the service closes the connection; return the bytes sent."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most_bytes:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def test_unended_headers_of_many_clients_delay_nobody(server: RunningServer) -> None:
    connections = [connect(server) for _ in range(200)]
    for connection in connections:
        connection.sendall(BEGIN + b"X-A: a")
    for _ in range(5):
        begin = time.monotonic()
        assert httpx.get(f"{server.url}/livez", timeout=60).status_code == 200
        assert time.monotonic() - begin < 20
    for connection in connections:
        connection.close()


def test_headers_within_the_cap_are_taken(server: RunningServer) -> None:
    headers = {"X-A": "a" * (MOST_HEADER_BYTES // 2)}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        # The count begins anew with each request of a connection.
        assert [http.get("/livez", timeout=60).status_code for _ in range(4)] == [200] * 4


def test_body_in_small_chunks_is_no_header(server: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"key": "chunks"'
        for _ in range(MOST_HEADER_BYTES):
            yield b" "
        yield b"}"

    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/runs", content=pieces(), headers=headers, timeout=60).status_code == 201


@pytest.mark.parametrize(
    ("begin", "piece"),
    [(b"GET /livez?", b"a" * MEBIBYTE), (BEGIN + b"X-A: ", b"a" * MEBIBYTE), (BEGIN, b"X-A: a\r\n" * 10_000)],
    ids=["target", "one header", "many headers"],
)
def test_headers_without_an_end_take_no_memory(server: RunningServer, begin: bytes, piece: bytes) -> None:
    with connect(server) as connection:
        before = resident_bytes()
        connection.sendall(begin)
        sent = send_until_refused(connection, piece, 32 * MEBIBYTE)
        assert sent < 16 * MEBIBYTE, "the service closes the connection"
        # The server is in this process.
        assert resident_bytes() - before < 16 * MEBIBYTE


@pytest.mark.parametrize(
    "sent", [b"\x00\x01\x02\r\n\r\n", BEGIN + b"Content-Length: -5\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_what_is_no_http_is_refused(server: RunningServer, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_second_host_header_is_refused(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
        answer = answer_of(connection)
        assert answer.status == 400


@pytest.mark.parametrize("key", ["", "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"])
@pytest.mark.parametrize(("path", "host", "status"), [("/livez", "127.0.0.1", 200), ("/livez", "evil.example", 400)])
def test_websocket_is_served_as_http(server: RunningServer, key: str, path: str, host: str, status: int) -> None:
    upgrade = f"Connection: Upgrade\r\nUpgrade: websocket\r\n{key}\r\n"
    with connect(server) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{upgrade}".encode())
        answer = answer_of(connection)
        assert answer.status == status
        assert status == 200 or answer.json()["type"] == "urn:foreshock:problem:host-not-allowed"
