"""No answer grows without bound: each array of the API is paged, capped by a setting, or explained here."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.pagination import encode_cursor
from foreshock_service.platform.parameters import LARGEST_INTEGER
from tests.service.sending import Sender, start_run

JSON = "application/json"

# Columnar answers: FORESHOCK_MAX_ANSWER_VALUES caps them (`AnswerTooLarge`).
COLUMNAR = {"/v1/runs/{run}/measurements", "/v1/runs/{run}/scalars"}

# Any other array of an answer, and why it is bounded.
BOUNDED = {
    "/v1/runs/{run}": "at most 20 tags, and the headline of its diagnosis",
    "/v1/measures": "the measures of the registry",
    "/v1/hardware": "the 500 workers seen last",
    "/v1/rules": "the rules of the service, at most 64",
    "/v1/certificates/{certificate}": "what was sent, at most FORESHOCK_MAX_JSON_BYTES",
    "/v1/runs/{run}/diagnosis": "at most 50 events, the findings of a run, and advice on these",
    "/v1/probes/{probe}": "the scorers, pairs and jobs of one request, whose numbers its schema bounds",
    "/v1/runs/{run}/probe-policy": "at most 32 scorers",
    "/v1/runs/{run}/lint": "one entry for each check of the catalogue, with at most 10 places",
    "/v1/runs/{run}/steps/{step}/lint": "one entry for each check of the catalogue",
    "/v1/runs/{run}/advice": "the newest points of each lever, and what `lr-advice` has",
    "/v1/runs/{run}/lr-advice": "one alert for each rule that is open; the halvings end at the floor",
    "/v1/runs/{run}/steps/{step}/attribution": "the links and scores of one step",
    "/v1/runs/{run}/steps/{step}/buckets": "a fixed number of buckets, or `limit` token ids",
    "/v1/runs/{run}/steps/{step}/corrections": "the corrections of the catalogue",
    "/v1/runs/{run}/steps/{step}/exact": "the pairs of the table of scorers",
    "/v1/runs/{run}/steps/{step}/layers": "at most 16 pairs, of a model's layers, whose number the schema bounds",
    "/v1/runs/{run}/steps/{step}/routing": "at most 16 pairs, of a model's layers, whose number the schema bounds",
    "/v1/runs/{run}/steps/{step}/theory": "notes of fixed sentences",
    "/v1/runs/{run}/steps/{step}/tokens": "at most 1,000 tokens, or FORESHOCK_MAX_ANSWER_VALUES of one rollout",
    "/v1/runs/{run}/steps/{step}/doctor": "the findings of one report, whose number is bounded when it is sent",
}


def arrays(schema: dict[str, Any], schemas: dict[str, Any], known: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the names of the arrays in a schema, at any depth."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in known:
            yield from arrays(schemas[name], schemas, known | {name})
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key, ()):
            yield from arrays(part, schemas, known)
    if schema.get("type") == "array":
        yield schema.get("title", "array")
    for part in schema.get("properties", {}).values():
        yield from arrays(part, schemas, known)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from arrays(schema["additionalProperties"], schemas, known)


def answers_with_arrays(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the GET operations whose answer has an array, by path."""
    found = {}
    for path, methods in document["paths"].items():
        content = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        if any(arrays(content.get(JSON, {}).get("schema", {}), document["components"]["schemas"])):
            found[path] = methods["get"]
    return found


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_every_array_is_paged_or_capped_or_explained(app: FastAPI) -> None:
    found = answers_with_arrays(app.openapi())
    paged = set()
    for path, operation in found.items():
        parameters = {each["name"]: each["schema"] for each in operation.get("parameters", ())}
        if "cursor" in parameters:
            assert parameters["limit"]["maximum"] <= 500, path
            paged.add(path)
        elif path in COLUMNAR:
            assert {"from_step", "to_step", "max_points", "format"} <= set(parameters), path
    assert set(found) == paged | COLUMNAR | set(BOUNDED)
    assert not paged & set(BOUNDED)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_attempts_and_decisions_come_in_pages(sender: Sender, http: httpx.Client) -> None:
    for number in range(4):
        sender.new_attempt(f"again-{number}", 0)
        decision = {"kind": "hold" if number % 2 == 0 else "release", "reason": "a test"}
        http.post(f"/v1/runs/{sender.run}/advice/decisions", json=decision).raise_for_status()
    assert [each["attempt"] for each in sender.items("attempts", limit=2)] == [1, 2, 3, 4, 5]
    revisions = [each["revision"] for each in sender.items("lr-advice/decisions", limit=3)]
    assert len(revisions) >= 4
    assert revisions == sorted(set(revisions))


def test_forged_cursors_and_groups_are_no_failure(http: httpx.Client) -> None:
    run = start_run(http, "forged").run
    largest = encode_cursor((LARGEST_INTEGER,))
    assert http.get(f"/v1/runs/{run}/steps", params={"cursor": largest}).json() == {"items": [], "next_cursor": None}
    assert http.get("/", params={"group": "%%"}).status_code == 200
