"""A crash between a shard's file and its row loses nothing that was promised and leaves at most an orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from service.app import create_app
from service.platform.decoding.pool import DecoderPool
from service.platform.settings import Settings
from tests.ports import free_port
from tests.service.sending import Sender, make_batch, start_run
from tests.service.server import RunningServer
from tests.service.stored import count_rows, list_files

_ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_killed_between_the_file_and_the_row_then_sent_again(settings: Settings, decoders: DecoderPool) -> None:
    port = free_port()
    environment = os.environ | {
        "FORESHOCK_DATABASE_URL": settings.database_url,
        "FORESHOCK_STORE_URL": settings.store_url,
        "PYTHONPATH": str(_ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.runs.ingest.crash_between_file_and_row", str(port)],
        env=environment, cwd=_ROOT,
    )  # fmt: skip
    body = encode_rollouts(make_batch(40))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        _wait_until_alive(http)
        sender = start_run(http)
        with pytest.raises(httpx.TransportError):
            sender.put_shard(0, body)
    assert process.wait(timeout=120) == -signal.SIGKILL

    assert "shards" not in count_rows(settings)
    orphans = [name for name in list_files(settings) if name.endswith(".parquet")]
    assert len(orphans) == 1

    with RunningServer(create_app(settings, decoders)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        sender = Sender(http, sender.run)
        assert sender.get("measurements").json()["columns"]["step"] == []
        answer = sender.put_shard(0, body)
        assert (answer.status_code, answer.json()["status"]) == (201, "stored")
        assert sender.get("steps/0/tokens").status_code == 200
    assert count_rows(settings)["shards"] == 1


def _wait_until_alive(http: httpx.Client) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            if http.get("/livez").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the service did not come up")
