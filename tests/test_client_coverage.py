"""Every route of the API is a call of a client: `Reader`, `Operator` or `Client`, or is excepted with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

import foreshock
from foreshock.learning_rate import AdviceFeed
from foreshock.operating.operator import Operator
from foreshock.reading.caller import Listing, Request
from foreshock.reading.reader import Reader
from foreshock_service.app import ROUTERS
from tests.foreshock.batches import random_batch
from tests.foreshock.client.faulty_service import faulty_service
from tests.foreshock.client.trainer import wait_until
from tests.foreshock.twins import described_methods

NOT_OFFERED = "/v1/leases"
"""Routes of the protocol of workers, spoken by `foreshock worker`: a lease has a fencing token and ends by itself."""

_ARGUMENTS: dict[str, Any] = {
    "alert": "a",
    "digest": "sha256:0",
    "format": "csv",
    "kind": "other",
    "last_steps": None,
    "path": "step-1",
    "probe": "p",
    "reason": "why",
    "root": "weights",
    "run": "r",
    "sample_id": "s",
    "step": 1,
    "toml": "",
}
"""Arguments of calls by name, for those without a default."""


def routes() -> list[APIRoute]:
    every = (route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute))
    return [route for route in every if route.path.startswith("/v1")]


def operations() -> set[tuple[str, str]]:
    return {(method, route.path) for route in routes() for method in route.methods}


def route_of(method: str, path: str) -> tuple[str, str]:
    """Return the route that takes a request; fail the test if there is none."""
    for route in routes():
        match, _ = route.matches({"type": "http", "method": method, "path": path, "headers": []})
        if match is Match.FULL:
            return method, route.path
    return pytest.fail(f"the service has no route {method} {path}")


def described_by(kind: type) -> Iterator[tuple[str, str]]:
    for name, method in described_methods(kind).items():
        _, *parameters = inspect.signature(method).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty]
        described = method.request(**{argument: _ARGUMENTS[argument] for argument in needed})
        request = described.page(None) if isinstance(described, Listing) else described
        assert isinstance(request, Request), name
        yield route_of(request.method, request.path)


def sent_by_client(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the routes of what a trainer's client sends, in both modes."""
    with faulty_service() as service:
        for mode in ("tokens", "statistics"):
            settings: dict[str, Any] = {"mode": mode, "heartbeat_seconds": 0.05, "strict": True}
            client = foreshock.Client(service.url, run_key=mode, spool_directory=folder / mode, **settings)
            with client.start_run(model="M"):
                client.log_rollouts(1, random_batch(1))
                client.log_scalars(1, {"grad_norm": 1.0})
                client.log_checkpoint(1, root="weights", path="step-1", digest="sha256:" + "0" * 64)
                client.log_change(1, "other")
                client.log_weights(1, trainer={}, engines={"0": {}})
                client.acknowledge(0, 1, 1e-6)
                # The pass over tokens may have to be compiled first.
                assert client.flush(300)
                with AdviceFeed(client) as feed:
                    feed.scale(1)
                    wait_until(lambda: any(path.endswith("/follow") for path in service.paths()))
        sent = [(item.method, item.path) for item in service.received]
    for method, path in sent:
        yield route_of(method, path)


def test_every_route_of_the_api_is_a_call_of_a_client_or_excepted(tmp_path: Path) -> None:
    offered = {*described_by(Reader), *described_by(Operator), *sent_by_client(tmp_path)}
    workers = {(method, path) for method, path in operations() if path.startswith(NOT_OFFERED)}
    missing = sorted(operations() - offered - workers)
    assert missing == [], f"no client offers {missing}: add a call to Reader or Operator"
    assert workers
    assert not workers & offered


def test_reader_only_reads_and_operator_only_changes() -> None:
    assert {method for method, _ in described_by(Reader)} == {"GET"}
    assert "GET" not in {method for method, _ in described_by(Operator)}
