"""Requests as bytes: headers that never end take no memory, and what is no HTTP is answered with a problem."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.health.figures import resident_bytes
from foreshock_service.platform.settings import Settings
from tests.service.operation.processes import RawAnswer, read_answer
from tests.service.server import RunningServer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

CAP = 16_384
MEBIBYTE = 1 << 20
BEGIN = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = (
    b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture
def server(settings: Settings, decoders: DecoderPool) -> Iterator[RunningServer]:
    """A server with a small cap on headers."""
    with RunningServer(create_app(settings.model_copy(update={"max_header_bytes": CAP}), decoders)) as running:
        yield running


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


def check_refused(answer: RawAnswer | None) -> None:
    assert answer is not None
    assert (answer.status, answer.headers["content-type"]) == (431, "application/problem+json")
    assert answer.json()["type"] == "urn:foreshock:problem:headers-too-large"
    assert "FORESHOCK_MAX_HEADER_BYTES" in answer.json()["detail"]
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /livez?" + b"a" * CAP + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        BEGIN + b"X-A: " + b"a" * CAP + b"\r\n\r\n",
        BEGIN + b"X-A:\r\n" * 1_000 + b"\r\n",
        CHUNKED + b"0\r\n" + b"X-A: a\r\n" * 1_000,
    ],
    ids=["target", "one header", "many headers", "trailers"],
)
def test_headers_beyond_the_cap_are_refused(server: RunningServer, request_head: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request_head)
        check_refused(read_answer(connection))
    assert httpx.get(f"{server.url}/livez").status_code == 200


def test_header_without_an_end_is_refused_at_the_cap(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(BEGIN + b"X-A: ")
        connection.settimeout(0.1)
        answer, sent = b"", 0
        while not answer and sent < 10 * CAP:
            connection.sendall(b"a" * 1024)
            sent += 1024
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert sent <= CAP + 4 * 1024


def test_headers_within_the_cap_are_taken(server: RunningServer) -> None:
    headers = {"X-A": "a" * (CAP // 2)}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        # The count begins anew with each request of a connection.
        assert [http.get("/livez").status_code for _ in range(4)] == [200] * 4


def test_body_in_small_chunks_is_no_header(server: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"key": "chunks"'
        for _ in range(CAP):
            yield b" "
        yield b"}"

    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/runs", content=pieces(), headers=headers, timeout=60).status_code == 201


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (BEGIN + b"X-A: ", b"a" * MEBIBYTE),
        (BEGIN, b"X-A: a\r\n" * 10_000),
        (CHUNKED + b"0\r\n", b"X-A: a\r\n" * 10_000),
    ],
    ids=["one header", "many headers", "trailers"],
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
def test_what_is_no_http_is_answered_with_a_problem(server: RunningServer, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        answer = read_answer(connection)
        assert answer is not None
        assert (answer.status, answer.headers["content-type"]) == (400, "application/problem+json")
        assert answer.json()["type"] == "urn:foreshock:problem:bad-request"
        assert answer.json()["detail"]


def test_second_host_header_is_refused(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
        answer = read_answer(connection)
        assert answer is not None
        assert answer.status == 400
        assert answer.json()["type"] == "urn:foreshock:problem:host-not-allowed"


@pytest.mark.parametrize("key", ["", "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"])
@pytest.mark.parametrize(("path", "host", "status"), [("/livez", "127.0.0.1", 200), ("/livez", "evil.example", 400)])
def test_request_for_a_websocket_is_served_as_http(
    server: RunningServer, key: str, path: str, host: str, status: int
) -> None:
    upgrade = f"Connection: Upgrade\r\nUpgrade: websocket\r\n{key}\r\n"
    with connect(server) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{upgrade}".encode())
        answer = read_answer(connection)
        assert answer is not None
        assert answer.status == status
        assert status == 200 or answer.json()["type"] == "urn:foreshock:problem:host-not-allowed"
