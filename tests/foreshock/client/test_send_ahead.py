"""Tests of the rollouts and scalars that are sent while earlier ones are under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreshock.client import Client
from tests.foreshock.client.faulty_service import FaultyService, Received
from tests.foreshock.client.trainer import rollouts, wait_until


@pytest.fixture
def client(make: Any, service: FaultyService) -> Client:
    """A registered client whose next rollouts are held by the service until `service.released` is set."""
    client: Client = make()
    client.start_run()
    assert client.flush(60)

    def hold_rollouts(received: Received) -> None:
        if "/rollouts/" in received.path:
            service.released.wait()

    service.always = hold_rollouts
    return client


def log(client: Client, *steps: int, scalars: int = 1) -> None:
    for step in steps:
        client.log_rollouts(step, rollouts(step))
        for number in range(scalars):
            client.log_scalars(step, {"number": number})


def scalars_of(service: FaultyService, step: int) -> list[int]:
    return [item.json()["values"]["number"] for item in service.received if f"/{step}/scalars" in item.path]


def test_scalars_and_the_next_rollouts_are_sent_while_rollouts_are_under_way(
    client: Client, service: FaultyService
) -> None:
    under_way: list[str] = []
    hold = service.always
    assert callable(hold)

    def note(received: Received) -> int | None:
        if "/rollouts/" in received.path:
            under_way.append(received.path)
        return hold(received)

    service.always = note
    log(client, 1, 2, 3, scalars=2)
    wait_until(lambda: scalars_of(service, 2) == [0, 1])
    assert scalars_of(service, 1) == [0, 1]
    assert [path.split("/")[5] for path in under_way] == ["1", "2"]
    assert not scalars_of(service, 3)
    service.released.set()
    assert client.flush(60)
    assert scalars_of(service, 3) == [0, 1]
    assert len(service.bodies("/rollouts/")) == 3
    assert (client.counters.delivered, client.counters.failed_requests) == (10, 0)


def test_scalars_stay_in_order(client: Client, service: FaultyService) -> None:
    log(client, 1, scalars=30)
    wait_until(lambda: len(scalars_of(service, 1)) == 30)
    assert scalars_of(service, 1) == list(range(30))
    service.released.set()


def test_the_end_of_the_run_waits_for_everything_before_it(client: Client, service: FaultyService) -> None:
    log(client, 1, 2, 3)
    client.finish()
    service.released.set()
    assert client.flush(60)
    methods = [item.method for item in service.received if "/steps/" in item.path or item.method == "PATCH"]
    assert methods == ["PUT"] * 6 + ["PATCH"]


def test_rollouts_that_fail_ahead_are_sent_in_their_turn(client: Client, service: FaultyService) -> None:
    hold = service.always
    assert callable(hold)
    failed: list[str] = []

    def fail_the_second_step_once(received: Received) -> int | None:
        if "/steps/2/rollouts/" in received.path and not failed:
            failed.append(received.path)
            return 503
        return hold(received)

    service.always = fail_the_second_step_once
    log(client, 1, 2, 3)
    wait_until(lambda: bool(failed))
    assert not service.bodies("/rollouts/")
    service.released.set()
    assert client.flush(60)
    steps = [path.split("/")[5] for path in service.paths() if "/rollouts/" in path]
    assert steps[0] == "1"
    assert sorted(steps) == ["1", "2", "3"]
    assert (client.counters.delivered, client.counters.failed_requests) == (7, 0)


def test_scalars_that_fail_ahead_are_sent_in_their_turn(client: Client, service: FaultyService) -> None:
    hold = service.always
    assert callable(hold)
    failed: list[str] = []

    def fail_scalars_once(received: Received) -> int | None:
        if "/scalars" in received.path and not failed:
            failed.append(received.path)
            return 503
        return hold(received)

    service.always = fail_scalars_once
    log(client, 1, scalars=2)
    wait_until(lambda: bool(failed))
    service.released.set()
    assert client.flush(60)
    assert len(service.bodies("/rollouts/")) == 1
    assert scalars_of(service, 1) == [0, 1]
    assert (client.counters.delivered, client.counters.failed_requests) == (4, 0)


def test_scalars_refused_ahead_are_kept_and_counted_once(
    client: Client, service: FaultyService, tmp_path: Path
) -> None:
    hold = service.always
    assert callable(hold)
    refused: list[str] = []

    def refuse_scalars(received: Received) -> int | None:
        if "/scalars" in received.path:
            refused.append(received.path)
            return 422
        return hold(received)

    service.always = refuse_scalars
    log(client, 1)
    wait_until(lambda: bool(refused))
    service.released.set()
    assert client.flush(60).undelivered == 0
    assert (client.counters.delivered, client.counters.rejected) == (2, 1)
    assert len(list((tmp_path / "spool" / "rejected").glob("*.body"))) == 1


def test_close_ends_both_requests_and_keeps_their_bytes(make: Any, service: FaultyService, tmp_path: Path) -> None:
    client = make(exit_seconds=0.2)
    client.start_run()
    assert client.flush(60)
    service.always = "held"
    log(client, 1, 2)
    wait_until(lambda: service.requests == 5)
    client.close()
    kept = sorted((tmp_path / "spool").glob("*/*.json"))
    assert len(kept) == 4
    assert client.counters.dropped == 0
    service.released.set()


def test_scalars_of_the_first_step_wait_for_its_registration(make: Any, service: FaultyService) -> None:
    client = make()
    client.start_run()
    log(client, 1)
    assert client.flush(60)
    assert [path for path in service.paths() if path.startswith("/v1/runs/run-run/att") or path == "/v1/runs"] == [
        "/v1/runs",
        "/v1/runs/run-run/attempts",
    ]
