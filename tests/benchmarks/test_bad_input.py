"""A seeded slice of `make bench-bad-input` holds its bars; mutations are the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.bad_input.__main__ import DECODER_BYTES, SERVICE_BYTES
from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.described import send_described
from benchmarks.bad_input.documents import hostile_document
from benchmarks.bad_input.mutated import send_mutated
from benchmarks.bad_input.scene import Scene, scene
from benchmarks.bad_input.tables import damaged, hostile_table
from foreshock.rollouts import encode_rollouts
from tests.service.sending import make_batch

pytestmark = pytest.mark.slow

MUTATIONS = 200


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("bad-input")) as running:
        yield running


def test_mutated_bodies_are_refused_and_nothing_breaks(service: Scene) -> None:
    document = httpx.get(f"{service.url}/openapi.json", timeout=120).json()
    tally = send_mutated(service, document, MUTATIONS, seed=1)
    assert not tally.faults, tally.examples
    assert tally.requests == MUTATIONS
    assert sum(count for status, count in tally.statuses.items() if 400 <= status < 500) > MUTATIONS / 2
    assert service.process.is_running()
    peaks = service.peaks()
    assert peaks["service"] < SERVICE_BYTES
    assert 0 < peaks["decoder"] < DECODER_BYTES
    assert service.strays() == []


def test_generated_requests_of_every_operation_get_documented_answers(service: Scene) -> None:
    tally = send_described(service, examples=1, seed=1)
    assert not tally.faults, tally.examples
    assert tally.requests > 200
    assert {200, 401, 403, 404} <= set(tally.statuses)


def test_same_seed_gives_the_same_bodies() -> None:
    body = encode_rollouts(make_batch(6, seed=1))
    makers: list[Callable[[random.Random], bytes]] = [
        lambda source: damaged(body, body[::-1], source),
        lambda source: hostile_table(body, source),
        lambda source: hostile_document({"key": "x", "values": [1, {"a": 2}]}, source),
    ]
    for make in makers:
        first, again = ([make(random.Random(seed)) for seed in range(20)] for _ in range(2))
        assert first == again
        assert len(set(first)) > 10


def test_undocumented_answers_and_server_errors_are_faults() -> None:
    tally = Tally()
    declared = {"allOf": [{}, {"properties": {"type": {"enum": ["urn:invalid"]}}}]}
    responses: dict[str, Any] = {
        "200": {"content": {"application/json": {}}},
        "422": {"content": {"application/problem+json": {"schema": declared}}},
    }
    json, problem = {"content-type": "application/json"}, {"content-type": "application/problem+json"}
    operation = ("GET", "/v1/runs")
    tally.judge(operation, responses, 200, json, b"{}", "")
    tally.judge(operation, responses, 422, problem, b'{"type": "urn:invalid"}', "")
    assert not tally.faults
    tally.judge(operation, responses, 422, problem, b'{"type": "urn:another"}', "")
    tally.judge(operation, responses, 404, problem, b'{"type": "urn:invalid"}', "")
    tally.judge(operation, responses, 503, json, b"{}", "")
    tally.judge(operation, responses, 404, json, b"{}", "")
    tally.judge(operation, responses, 201, json, b"{}", "")
    tally.judge(operation, responses, 200, {"content-type": "text/html"}, b"<p>", "")
    assert sum(tally.faults.values()) == 7
