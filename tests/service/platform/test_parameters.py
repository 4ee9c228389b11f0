"""Query parameters that a route of the API does not declare are errors with a suggestion."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import httpx
import pytest

from foreshock_service.app import api_routes
from foreshock_service.platform.pagination import InvalidCursor, decode_cursor, encode_cursor


def test_unknown_parameter_is_refused_on_every_route_of_the_api(http: httpx.Client) -> None:
    routes = [route for route in api_routes() if route.path.startswith("/v1")]
    assert len(routes) > 30
    for route in routes:
        path = re.sub(r"\{[^}]+\}", "1", route.path)
        for method in route.methods:
            answer = http.request(method, path, params={"surely_unknown": "1"})
            assert answer.status_code == 422, (method, path)
            assert answer.headers["content-type"] == "application/problem+json"
            assert "unknown parameter 'surely_unknown'" in answer.json()["detail"]
            assert [item["location"] for item in answer.json()["errors"]] == ["query.surely_unknown"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_similar_parameter_is_suggested(http: httpx.Client) -> None:
    for path, suggested in (
        ("/v1/runs?projet=a", "project"),
        ("/v1/runs?limt=3&key=a", "limit"),
        ("/v1/runs/nightly/measurements?comparision=trainer/rollout", "comparison"),
        ("/v1/runs/nightly/steps/1/buckets?limits=1", "limit"),
        ("/v1/runs/nightly/lr-advice?steps=1", "step"),
        ("/v1/runs/nightly/steps?Attempt=1", "attempt"),
    ):
        answer = http.get(path)
        assert answer.status_code == 422, path
        assert f"did you mean {suggested!r}?" in answer.json()["detail"]


def test_known_parameters_are_listed(http: httpx.Client) -> None:
    detail = http.get("/v1/runs?zzz=1").json()["detail"]
    known = "cursor, key, limit, model, model_kind, project, search, state, verdict"
    assert detail == f"query.zzz: unknown parameter 'zzz' (parameters: {known})"


def test_probes_and_pages_accept_other_parameters(http: httpx.Client) -> None:
    assert http.get("/livez?verbose").status_code == 200
    assert http.get("/?utm_source=mail").status_code == 200


def forged(key: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def test_cursor_gives_its_key_back() -> None:
    assert decode_cursor(encode_cursor((2**63 - 1, "läuf/1")), (int, str)) == (2**63 - 1, "läuf/1")


@pytest.mark.parametrize(
    "key", [[1], [1, 2], ["1", "a"], [True, "a"], [1.5, "a"], [2**63, "a"], [1, "\ud800"], [1, "a\x00"], {"a": 1}, 7]
)
def test_forged_cursor_is_refused(key: Any) -> None:
    with pytest.raises(InvalidCursor):
        decode_cursor(forged(key), (int, str))


def test_forged_cursor_of_a_list_is_a_422(http: httpx.Client) -> None:
    for path in ("/v1/runs", "/v1/alerts", "/v1/findings", "/v1/probes"):
        # No database stores these in a text.
        for text in ("\ud800", "\x00"):
            answer = http.get(path, params={"cursor": forged([1, text])})
            assert answer.status_code == 422, path
            assert answer.json()["type"] == "urn:foreshock:problem:invalid-cursor"
