"""A seeded slice of `make bench-bad-input` holds its bars; mutations are the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.bad_input.__main__ import DECODER_BYTES, SERVICE_BYTES
from benchmarks.bad_input.addresses import send_cursors, send_queries
from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.described import send_described
from benchmarks.bad_input.mutated import send_mutated
from benchmarks.bad_input.scene import Scene, scene
from tests.service.postgres import start_postgres

pytestmark = pytest.mark.slow

MUTATIONS = 200
CURSORS, QUERIES = 140, 250


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("bad-input")) as running:
        yield running


@pytest.fixture(scope="module")
def postgres_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    cluster = start_postgres()
    try:
        with scene(tmp_path_factory.mktemp("bad-input-postgres"), cluster.new_database()) as running:
            yield running
    finally:
        cluster.stop()


def assert_unharmed(service: Scene) -> None:
    assert service.process.is_running()
    assert httpx.get(f"{service.url}/livez", timeout=60).status_code == 200
    assert service.peaks()["service"] < SERVICE_BYTES
    assert service.strays() == []


def test_mutated_bodies_are_refused_and_nothing_breaks(service: Scene) -> None:
    document = httpx.get(f"{service.url}/openapi.json", timeout=120).json()
    tally = send_mutated(service, document, MUTATIONS, seed=1)
    assert not tally.faults, tally.examples
    assert tally.requests == MUTATIONS
    assert sum(count for status, count in tally.statuses.items() if 400 <= status < 500) > MUTATIONS / 2
    assert 0 < service.peaks()["decoder"] < DECODER_BYTES
    assert_unharmed(service)


def test_generated_requests_of_every_operation_get_documented_answers(service: Scene) -> None:
    tally = send_described(service, examples=1, seed=1)
    assert not tally.faults, tally.examples
    assert tally.requests > 200
    assert {200, 401, 403, 404} <= set(tally.statuses)


@pytest.mark.parametrize("name", ["service", "postgres_service"])
def test_forged_cursors_get_documented_answers(name: str, request: pytest.FixtureRequest) -> None:
    service: Scene = request.getfixturevalue(name)
    tally = send_cursors(service, httpx.get(f"{service.url}/openapi.json", timeout=120).json(), CURSORS, seed=1)
    assert not tally.faults, tally.examples
    assert tally.requests == CURSORS
    # Some come to the database.
    assert {200, 422} <= set(tally.statuses)
    assert_unharmed(service)


@pytest.mark.parametrize("name", ["service", "postgres_service"])
def test_hostile_queries_of_pages_and_calls_get_documented_answers(name: str, request: pytest.FixtureRequest) -> None:
    service: Scene = request.getfixturevalue(name)
    tally = send_queries(service, httpx.get(f"{service.url}/openapi.json", timeout=120).json(), QUERIES, seed=1)
    assert not tally.faults, tally.examples
    assert tally.requests == QUERIES
    assert {200, 404, 422} <= set(tally.statuses)
    assert_unharmed(service)


def test_undocumented_answers_and_server_errors_are_faults() -> None:
    tally = Tally()
    responses: dict[str, Any] = {
        "200": {"content": {"application/json": {}}},
        "default": {"content": {"application/problem+json": {}}},
    }
    invalid = b'{"type": "urn:foreshock:problem:invalid-request"}'
    json, problem = {"content-type": "application/json"}, {"content-type": "application/problem+json"}
    operation = ("GET", "/v1/runs")
    tally.judge(operation, responses, 200, json, b"{}", "")
    tally.judge(operation, responses, 422, problem, invalid, "")
    assert not tally.faults
    tally.judge(operation, responses, 422, problem, b'{"type": "urn:another"}', "")
    tally.judge(operation, responses, 404, problem, invalid, "")
    tally.judge(operation, responses, 503, json, b"{}", "")
    tally.judge(operation, responses, 404, json, b"{}", "")
    tally.judge(operation, responses, 201, json, b"{}", "")
    tally.judge(operation, responses, 200, {"content-type": "text/html"}, b"<p>", "")
    assert sum(tally.faults.values()) == 7


def test_server_errors_and_undocumented_problems_of_pages_are_faults() -> None:
    problem = {"content-type": "application/problem+json"}
    tally = Tally()
    tally.judge_page("/", 200, {"content-type": "text/html; charset=utf-8"}, b"<p>", "")
    tally.judge_page("/", 303, {}, b"", "")
    tally.judge_page("/", 422, problem, b'{"type": "urn:foreshock:problem:invalid-request"}', "")
    assert not tally.faults
    tally.judge_page("/", 500, problem, b'{"type": "urn:foreshock:problem:internal"}', "")
    tally.judge_page("/", 400, problem, b'{"type": "urn:foreshock:problem:invalid-request"}', "")
    tally.judge_page("/", 422, problem, b'{"type": "urn:another"}', "")
    tally.judge_page("/", 400, {"content-type": "application/xml"}, b"no", "")
    assert sum(tally.faults.values()) == 4
