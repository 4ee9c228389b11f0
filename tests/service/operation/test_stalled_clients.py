"""Clients that stop sending in the middle of a request: they are told so, and take nothing from the others."""

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform import request_guards
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from tests.service.operation.processes import answer_of
from tests.service.sending import make_batch, start_run
from tests.service.server import RunningServer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

SECONDS = 1.0
STALLED = 80


@pytest.fixture
def impatient(settings: Settings, decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server that waits a second for bytes."""
    monkeypatch.setattr(request_guards, "STALL_SECONDS", SECONDS)
    with RunningServer(create_app(settings, decoders)) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def head(path: str, length: int, media_type: str, method: str = "PUT") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {media_type}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_slow_answer_is_no_stall(impatient: RunningServer) -> None:
    with httpx.Client(base_url=impatient.url, timeout=60) as http:
        run = start_run(http).run
        etag = http.get(f"/v1/runs/{run}/lr-advice").headers["ETag"]
        answer = http.get(f"/v1/runs/{run}/lr-advice", params={"wait": 3 * SECONDS}, headers={"If-None-Match": etag})
        assert answer.status_code == 304


@pytest.mark.parametrize(
    ("path", "media_type", "method"),
    [
        ("/v1/runs", "application/json", "POST"),
        ("/v1/runs/{run}/steps/1/rollouts/0", "application/vnd.apache.parquet", "PUT"),
        # No route reads its body.
        ("/nowhere", "application/json", "POST"),
    ],
)
def test_body_that_stops_coming_is_refused(impatient: RunningServer, path: str, media_type: str, method: str) -> None:
    with httpx.Client(base_url=impatient.url, timeout=60) as http:
        path = path.replace("{run}", start_run(http).run)
    begin = time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(head(path, 1000, media_type, method) + b"{")
        answer = answer_of(connection)
        if path == "/nowhere":
            assert answer.status == 404
            return
        assert (answer.status, answer.headers["content-type"]) == (408, "application/problem+json")
        assert answer.json()["type"] == "urn:foreshock:problem:request-timeout"
        assert answer.headers["connection"] == "close"
        assert connection.recv(1) == b""
    assert SECONDS * 0.9 <= time.monotonic() - begin < 30


@pytest.mark.parametrize("length", [10**9, 2**63 - 1])
@pytest.mark.parametrize("media_type", ["application/json", "application/vnd.apache.parquet"])
def test_length_above_the_cap_is_refused_before_any_byte_of_the_body(
    server: RunningServer, length: int, media_type: str
) -> None:
    begin = time.monotonic()
    with connect(server) as connection:
        connection.sendall(head("/v1/runs", length, media_type, "POST"))
        answer = answer_of(connection)
        assert answer.status == 413
        assert f"{length:,}" in answer.json()["detail"]
    assert time.monotonic() - begin < 25, "it does not wait for the body, for 30 s"


def test_client_that_writes_on_after_the_refusal_gets_the_answer(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(head("/v1/runs", 10**9, "application/json", "POST"))
        with contextlib.suppress(OSError):
            for _ in range(100):
                time.sleep(0.02)
                connection.sendall(bytes(65_536))
        answer = answer_of(connection)
        assert answer.status == 413


def test_stalled_uploads_delay_no_others(
    settings: Settings, decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_guards, "STALL_SECONDS", 10.0)
    with RunningServer(create_app(settings, decoders)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        sender = start_run(http)
        body = encode_rollouts(make_batch())
        connections = []
        for step in range(STALLED):
            connection = connect(server)
            path = f"/v1/runs/{sender.run}/steps/{step}/rollouts/0"
            connection.sendall(head(path, len(body), "application/vnd.apache.parquet") + body[:100])
            connections.append(connection)
        paths = ("/livez", "/readyz", f"/v1/runs/{sender.run}/lr-advice", f"/v1/runs/{sender.run}/alerts")
        for path in paths:
            begin = time.monotonic()
            assert http.get(path).status_code == 200
            assert time.monotonic() - begin < 8
        answers = [answer_of(connection) for connection in connections]
        for connection in connections:
            connection.close()
        # Those that had a place ran into the timeout; the others were refused at once.
        assert {answer.status for answer in answers} == {408, 503}
        assert sender.put_shard(1, body).status_code == 201
