"""Every error over every route is a problem document of a documented type."""

import json
import re
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate

from benchmarks.bad_input.answers import is_known
from foreshock_service.app import api_routes, create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from tests.service.sending import Sender

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

# Values that are invalid for every path parameter of every route.
_BAD_VALUES = ("no-such-thing", "-1", "99999999999999999999", "%00", "run_00000000000000000000000000")
_METHODS = ("GET", "PUT", "POST", "PATCH", "DELETE")


def v1_routes() -> list[APIRoute]:
    """Return the routes of the API; pages answer in HTML."""
    return [route for route in api_routes() if route.path.startswith("/v1")]


def assert_problem(answer: httpx.Response, where: str) -> None:
    """Assert the shape that every error has, and that its type is a documented one."""
    assert answer.headers["content-type"] == "application/problem+json", f"{where}: {answer.text[:200]}"
    document: dict[str, Any] = answer.json()
    assert document["status"] == answer.status_code, where
    assert is_known(answer.status_code, answer.headers, answer.content), where
    assert document["title"], where
    assert document["detail"], where
    assert set(document) <= {"type", "title", "status", "detail", "row", "column", "errors", "request_id"}, where
    assert document["request_id"] == answer.headers["X-Request-Id"], where


@pytest.mark.slow
def test_bad_paths_queries_and_bodies_are_problems_on_every_route(http: httpx.Client) -> None:
    asked = 0
    for route in v1_routes():
        for method in sorted(route.methods):
            for value in _BAD_VALUES:
                path = "/".join(value if part.startswith("{") else part for part in route.path.split("/"))
                for content, media_type in (
                    (b"{", "application/json"),
                    (b'{"a": [1', "application/vnd.apache.parquet"),
                ):
                    query = {
                        "cursor": "?", "limit": "0", "attempt": "x", "from_step": "-5", "wait": "soon", "scorer": "",
                    }  # fmt: skip
                    answer = http.request(
                        method, path, params=query, content=content, headers={"Content-Type": media_type}
                    )
                    if answer.status_code >= 400:
                        assert_problem(answer, f"{method} {path}")
                        assert answer.status_code < 500, f"{method} {path}: {answer.text}"
                        asked += 1
                    else:
                        assert "{" not in route.path, f"{method} {path} took {value!r}"
    assert asked > 100


def test_invalid_json_bodies_are_problems(sender: Sender, http: httpx.Client) -> None:
    wrong: tuple[Any, ...] = (
        [],
        "text",
        7,
        None,
        {"unknown": {"deep": [1]}},
        {"key": "\x00", "step": -1, "values": []},
    )
    for route in v1_routes():
        path = route.path.replace("{run}", sender.run).replace("{step}", "0").replace("{shard}", "0")
        for method in sorted(route.methods & {"PUT", "POST", "PATCH"}):
            for body in wrong:
                answer = http.request(
                    method, path, content=json.dumps(body), headers={"Content-Type": "application/json"}
                )
                if answer.status_code >= 400:
                    assert_problem(answer, f"{method} {path} {body}")
                    assert answer.status_code < 500, f"{method} {path}: {answer.text}"


@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_json_of_another_media_type_is_a_415_that_names_the_type(http: httpx.Client, media_type: str) -> None:
    answer = http.post("/v1/runs", content=b'{"key": "a"}', headers={"Content-Type": media_type} if media_type else {})
    assert answer.status_code == 415
    assert_problem(answer, media_type)
    assert "Content-Type: application/json" in answer.json()["detail"]


def test_unknown_paths_and_methods_are_problems(http: httpx.Client) -> None:
    assert_problem(http.get("/v1/no/such/path"), "unknown path")
    for route in v1_routes():
        for method in set(_METHODS) - {"GET"}:
            others = {name for each in v1_routes() if each.path == route.path for name in each.methods}
            if method not in others:
                answer = http.request(method, route.path.replace("{", "").replace("}", ""))
                assert answer.status_code in (404, 405, 422)
                assert_problem(answer, f"{method} {route.path}")


def test_internal_error_is_a_problem_without_its_cause(settings: Settings, decoders: DecoderPool) -> None:
    app = create_app(settings, decoders)

    @app.get("/v1/broken")
    def broken() -> None:
        raise RuntimeError("a secret cause")

    from fastapi.testclient import TestClient

    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        answer = client.get("/v1/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_openapi_document_is_valid_and_declares_the_problem_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    validate(document)
    assert "HTTPValidationError" not in json.dumps(document)
    for route in v1_routes():
        for method in route.methods:
            responses = document["paths"][route.path][method.lower()]["responses"]
            assert list(responses["default"]["content"]) == ["application/problem+json"], f"{method} {route.path}"
            assert all(status < "400" for status in responses if status != "default"), f"{method} {route.path}"


def test_documentation_and_health_routes_answer(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assets = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text)
    assert assets
    # Nothing is loaded from other hosts, because clusters often reach no CDN.
    assert {http.get(asset).status_code for asset in assets if asset.startswith("/")} == {200}
    assert all(asset.startswith("/") for asset in assets), assets
    assert http.get("/livez").json() == {"status": "alive"}
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert set(ready.json()["checks"].values()) == {"ok"}
