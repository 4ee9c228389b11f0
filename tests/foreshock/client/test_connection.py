"""The connection sends its key to the configured address only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from foreshock.client.connection import ServiceConnection
from foreshock.errors import WrongService
from tests.foreshock.client.faulty_service import FaultyService


@pytest.fixture
def redirecting(service: FaultyService) -> Iterator[str]:
    """A server that redirects every request to the other service."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", service.url + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_key_does_not_follow_a_redirect(redirecting: str, service: FaultyService) -> None:
    with ServiceConnection(redirecting, "fsk_secret") as connection, pytest.raises(WrongService, match="redirects to"):
        connection.get_json("/v1/runs")
    assert service.requests == 0
