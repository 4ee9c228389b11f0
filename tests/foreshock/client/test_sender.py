"""Tests of sending a backlog: items of neighbouring steps at once, unless the service takes one at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from foreshock.client import Client
from foreshock.client.deliveries import Delivery, Registration
from tests.foreshock.client.faulty_service import FaultyService, Received
from tests.foreshock.client.trainer import rollouts
from tests.waiting import wait_until


class Overlaps:
    """Counts how many requests a service answers at the same time; each takes 50 ms."""

    def __init__(self, fault: Callable[[Received], int | None] = lambda _: None) -> None:
        self.most, self.alone = 0, True
        self._under_way: list[str] = []
        self._lock = threading.Lock()
        self._fault = fault

    def __call__(self, received: Received) -> int | None:
        with self._lock:
            self._under_way.append(received.path)
            self.most = max(self.most, len(self._under_way))
            if any(path.endswith("length_cap") for path in self._under_way):
                self.alone &= len(self._under_way) == 1
            self.alone &= len(set(self._under_way)) == len(self._under_way)
        time.sleep(0.05)
        with self._lock:
            self._under_way.remove(received.path)
        return self._fault(received)


def log_steps(client: Client, steps: range) -> None:
    for step in steps:
        if step == 10:
            client.log_change(step, "length_cap", before=8, after=16)
        client.log_rollouts(step, rollouts())
        client.log_scalars(step, {"reward": 0.5})
        client.log_scalars(step, {"reward": 0.6})


def test_backlog_is_sent_in_order_but_for_three_steps_at_once(make: Any, service: FaultyService) -> None:
    service.stop()
    client = make()
    log_steps(client, range(20))
    service.always = overlaps = Overlaps()
    service.start()
    assert client.flush(120)
    assert 1 < overlaps.most <= 4
    assert overlaps.alone
    assert client.counters.delivered == 62
    # Of two reports of one step the later one counts.
    reported = [json.loads(body)["values"]["reward"] for body in service.bodies("steps/7/scalars")]
    assert reported == [0.5, 0.6]
    paths = service.paths()
    steps = [int(path.split("/")[5]) for path in paths if "/steps/" in path or path.endswith("length_cap")]
    assert all(step >= max(steps[: place + 1]) - 3 for place, step in enumerate(steps))
    assert paths.index("/v1/runs/run-run/changes/10/length_cap") < paths.index("/v1/runs/run-run/steps/10/scalars")


def test_service_that_takes_one_at_a_time_gets_the_backlog(make: Any, service: FaultyService) -> None:
    service.stop()
    client = make()
    log_steps(client, range(8))
    under_way = threading.Semaphore(1)

    def one_at_a_time(received: Received) -> int | None:
        if not under_way.acquire(blocking=False):
            return 429
        time.sleep(0.02)
        under_way.release()
        return None

    service.always, service.retry_after = one_at_a_time, "0"
    service.start()
    assert client.flush(120)
    assert client.counters.rejected == client.counters.dropped == 0


def test_acknowledgement_and_end_say_whose_they_are_also_those_that_an_earlier_process_left_in_the_spool(
    make: Any, service: FaultyService
) -> None:
    service.stop()
    first = make(attempt_key="first")
    first.start_run()
    first.acknowledge(1, 300, 1e-6, 1.0)
    first.finish(failed=True)
    first.close(1)
    service.start()
    second = make(attempt_key="second", heartbeat_seconds=0.05)
    second.start_run(resume_step=4)
    second.acknowledge(2, 4, 1e-7, 0.1)
    assert second.flush(60)
    sent = [json.loads(body) for body in service.bodies("/ack")]
    assert {each["step"]: each["attempt"] for each in sent} == {300: 1, 4: 2}
    assert second.attempt == 2
    [end] = (request.json() for request in service.received if request.method == "PATCH")
    assert end == {"state": "failed", "attempt": 1}
    before = len(service.bodies("/clients/"))
    wait_until(lambda: len(service.bodies("/clients/")) > before, 20)


@pytest.mark.parametrize("body", [b"no JSON", b"[1]", b"\xff"])
def test_spooled_acknowledgement_that_is_none_is_left_to_the_service(body: bytes) -> None:
    registration = Registration({"project": "default", "key": "run"}, {"key": "first"})
    delivery = Delivery("acknowledgement", registration, "POST", "/v1/runs/{run}/lr-advice/ack", body=body)
    assert delivery.of_attempt(2) == delivery
