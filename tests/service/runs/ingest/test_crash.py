"""Crashes in the middle of an upload: acknowledged data is kept, and unfinished work is resumed or can be retried."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from tests.paths import PYTHONPATH, REPOSITORY
from tests.ports import free_port
from tests.service.advancing import advance_all
from tests.service.sending import Sender, make_batch, start_run
from tests.service.server import RunningServer
from tests.service.stored import count_rows, list_files
from tests.waiting import wait_until


@contextmanager
def service_that_dies_in(function: str, settings: Settings) -> Iterator[httpx.Client]:
    """Yield a client of a service in another process; check at the end that the service was killed."""
    port = free_port()
    environment = os.environ | {
        "FORESHOCK_DATABASE_URL": settings.database_url,
        "FORESHOCK_STORE_URL": settings.store_url,
        "PYTHONPATH": PYTHONPATH,
        # A process that compiles the pass would take the processors from the decoder of the first upload.
        "FORESHOCK_TOKEN_PASS": "numpy",
        "FORESHOCK_DECODE_PROCESSES": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.runs.ingest.crashing_service", str(port), function],
        env=environment, cwd=REPOSITORY,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _wait_until_alive(http)
            yield http
        assert process.wait(timeout=120) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_upload_killed_before_its_row_is_an_orphan_and_sent_again(settings: Settings, decoders: DecoderPool) -> None:
    body = encode_rollouts(make_batch(40))
    with service_that_dies_in("commit_shard", settings) as http:
        sender = start_run(http)
        with pytest.raises(httpx.TransportError):
            sender.put_shard(0, body)

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


@pytest.mark.slow
def test_step_killed_before_its_fold_is_closed_by_the_next_service(settings: Settings, decoders: DecoderPool) -> None:
    with service_that_dies_in("close_step", settings) as http:
        sender = start_run(http)
        sender.put_shard(0, make_batch(seed=1), 0, 2).raise_for_status()
        # It dies just after the answer, or just before.
        with suppress(httpx.TransportError):
            sender.put_shard(0, make_batch(seed=2), 1, 2)
        wait_until(lambda: not is_alive(http))

    assert count_rows(settings)["shards"] == 2
    app = create_app(settings, decoders)
    with RunningServer(app) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        sender = Sender(http, sender.run)
        advance_all(app.state.advancing)
        (step,) = sender.get("steps").json()["items"]
        assert (step["shards"], step["closed"]) == (2, True)
        assert sender.get("steps/0/lint").json()["shards"] == 2
        again = sender.put_shard(0, make_batch(seed=2), 1, 2)
        assert again.json()["status"] == "duplicate"


def is_alive(http: httpx.Client) -> bool:
    try:
        return http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def _wait_until_alive(http: httpx.Client) -> None:
    wait_until(lambda: is_alive(http), 240)
