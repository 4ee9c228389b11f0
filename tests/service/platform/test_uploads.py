"""Uploads that wait for a decoder leave the threads of other requests free; more than fit are asked to come again."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.shard_decoding import PRELOAD
from tests.service.sending import make_batch, start_run
from tests.service.server import RunningServer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

PLACES = 60
UPLOADS = 80


class HeldDecoders(DecoderPool):
    """Decoders that begin when they are released."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, PRELOAD)
        self.released = threading.Event()
        self.waiting = threading.Semaphore(0)

    def run(self, function: Any, *arguments: Any, **named: Any) -> Any:
        self.waiting.release()
        assert self.released.wait(120)
        return super().run(function, *arguments, **named)


@pytest.fixture
def held(settings: Settings) -> Iterator[tuple[RunningServer, HeldDecoders]]:
    """A server whose decoders are held, with more places than the server has threads for other requests."""
    settings = settings.model_copy(update={"decode_processes": 2, "decode_queue": PLACES - 2, "token_pass": "numpy"})
    decoders = HeldDecoders(settings)
    decoders.warm_up()
    with RunningServer(create_app(settings, decoders)) as server:
        yield server, decoders
    decoders.close()


def test_other_requests_are_answered_while_every_place_is_taken(held: tuple[RunningServer, HeldDecoders]) -> None:
    server, decoders = held
    with httpx.Client(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=200)) as http:
        sender = start_run(http)
        body = encode_rollouts(make_batch())
        with ThreadPoolExecutor(UPLOADS) as threads:
            uploads = [threads.submit(sender.put_shard, step, body) for step in range(UPLOADS)]
            for _ in range(PLACES):
                assert decoders.waiting.acquire(timeout=120)
            paths = ("/livez", "/readyz", f"/v1/runs/{sender.run}", f"/v1/runs/{sender.run}/lr-advice")
            assert [http.get(path).status_code for path in paths] == [200] * len(paths)
            scalars = http.put(f"/v1/runs/{sender.run}/steps/1/scalars", json={"values": {"reward": 1.0}})
            assert scalars.status_code == 204
            assert not any(upload.done() and upload.result().status_code == 201 for upload in uploads)
            decoders.released.set()
            answers = [upload.result() for upload in uploads]
    stored = [answer for answer in answers if answer.status_code == 201]
    busy = [answer for answer in answers if answer.status_code == 503]
    assert len(stored) >= PLACES
    assert len(stored) + len(busy) == UPLOADS
    assert all(answer.json()["type"] == "urn:foreshock:problem:uploads-busy" for answer in busy)
    assert all(answer.headers["Retry-After"] == "1" for answer in busy)
