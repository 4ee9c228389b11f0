"""Real service processes, and raw sockets that speak HTTP to them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.paths import PYTHONPATH
from tests.ports import free_port
from tests.waiting import wait_until_answered


@dataclass
class ServiceProcess:
    """A running `foreshock serve`; its connections are closed at the end."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    connections: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        self.connections.append(connection)
        return connection


@contextlib.contextmanager
def service_process(folder: Path, port: int | None = None, /, **settings: str) -> Iterator[ServiceProcess]:
    """Start `foreshock serve` in `folder` and wait until it is ready; it is killed at the end if it still runs.

    `port` is a free one by default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    port = port or free_port()
    own = {"PYTHONPATH": PYTHONPATH, "FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}
    command = [sys.executable, "-m", "foreshock.commands.main", "serve", "--port", str(port)]
    log = folder / "serve.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(command, env=kept | own | settings, cwd=folder, stdout=sink, stderr=sink)
    service = ServiceProcess(process, port, log)
    try:
        wait_until_answered(f"{service.url}/readyz", lambda: process.poll() is None, log)
        yield service
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)
        for connection in service.connections:
            connection.close()


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def answer_of(connection: socket.socket) -> RawAnswer:
    """Read one answer."""
    received = b""
    while b"\r\n\r\n" not in received:
        block = connection.recv(65536)
        assert block, "the connection was closed without an answer"
        received += block
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        block = connection.recv(65536)
        assert block, "the connection ended in the body"
        body += block
    return RawAnswer(int(first.split()[1]), headers, body)
