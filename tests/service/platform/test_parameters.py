"""Query parameters that a route of the API does not declare are errors with a suggestion."""

import base64
import json
import re
from typing import Any

import httpx
import pytest

from foreshock_service.app import api_routes
from foreshock_service.platform.pagination import InvalidCursor, decode_cursor, encode_cursor
from foreshock_service.platform.settings import Settings
from tests.service.sending import start_run
from tests.service.stored import count_rows
from tests.service.working import WEIGHTS


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


CHECKPOINT = {"root": "weights", "path": "run/step_20", "digest": WEIGHTS}
NESTED = json.loads("[" * 18 + "1" + "]" * 18)
# Path below /v1/runs (`{run}` is a run), method, bodies.
REFUSED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("", "POST", (
        {}, {"key": ""}, {"key": "nul \x00"}, {"key": "k" * 201}, {"key": "lone \ud800 surrogate"},
        {"key": "k", "initial_learning_rate": 0}, {"key": "k", "initial_learning_rate": "NaN"},
        {"key": "k", "length_cap": 2**63}, {"key": "k", "advice_mode": "maybe"}, {"key": "k", "model_kind": "sparse"},
        {"key": "k", "model_kind": ""}, {"key": "k", "model_kind": 3},
    )),
    ("/{run}", "PATCH", ({"state": "paused"}, {"key": "other"})),
    ("/{run}/attempts", "POST", tuple(
        {"key": "a", "fingerprint": each} for each in ({"a": "\x00"}, {"a": 2**70}, "text", {"a": NESTED})
    )),
    ("/{run}/attempts/1/clients/a%20b", "PUT", ({},)),
    ("/{run}/attempts/1/clients/a", "PUT", (
        {"rejected": -1}, {"dropped": 2**63}, {"reason": "\x00"}, {"remarks": ["x" * 501]},
    )),
    ("/{run}/steps/0/scalars", "PUT", (
        {}, {"values": {}}, {"values": {"a": "x"}}, {"values": {"": 1}}, {"source": ""},
    )),
    ("/{run}/changes/5/weather", "PUT", ({},)),
    ("/{run}/changes/-1/other", "PUT", ({},)),
    ("/{run}/changes/5/other", "PUT", ({"note": "nul\x00"}, {"before": [1]})),
    ("/{run}/checkpoints/20?attempt=1", "PUT", tuple(CHECKPOINT | each for each in (
        {"path": "/etc"}, {"path": "../other"}, {"path": "a/../../b"}, {"path": "a\\b"}, {"path": ""}, {"path": "."},
        {"path": "nul\x00"}, {"root": "a/b"}, {"root": ".."}, {"root": ""}, {"digest": "md5:abc"},
        {"format": "pickle"}, {"weights_version": -1}, {"expires_at_us": 2**64},
    ))),
    ("/{run}/probe-policy", "PUT", ({"every_steps": 0}, {"budget_seconds": 60}, {"every": 5})),
)  # fmt: skip


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_invalid_values_are_refused_and_nothing_is_stored(http: httpx.Client, settings: Settings) -> None:
    run = start_run(http).run
    before = count_rows(settings)
    for path, method, bodies in REFUSED:
        for body in bodies:
            # json.dumps escapes code points that UTF-8 cannot encode.
            answer = http.request(
                method,
                f"/v1/runs{path.replace('{run}', run)}",
                content=json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 422, (path, body, answer.text)
            assert answer.json()["type"] == "urn:foreshock:problem:invalid-request", (path, body)
    assert count_rows(settings) == before
    assert http.get(f"/v1/runs/{run}").json()["state"] == "running"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_attempt_that_does_not_exist_is_not_found(http: httpx.Client) -> None:
    run = start_run(http).run
    for path in ("changes/5/other?attempt=7", "attempts/9/clients/a"):
        assert http.put(f"/v1/runs/{run}/{path}", json={}).status_code == 404
