"""What a call cannot take is refused with 422, and nothing of it is stored."""

from __future__ import annotations

import json

import httpx
import pytest

from foreshock_service.platform.settings import Settings
from tests.service.sending import start_run
from tests.service.stored import count_rows
from tests.service.working import WEIGHTS

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
