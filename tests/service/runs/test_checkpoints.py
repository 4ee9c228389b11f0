"""Checkpoints: announced, announced again, and restricted to their root."""

from __future__ import annotations

import httpx
import pytest

from tests.service.sending import start_run

GOOD = {"root": "weights", "path": "run/step_20", "digest": "sha256:" + "0" * 64}


def test_new_announcement_overwrites_checkpoint(http: httpx.Client) -> None:
    run = start_run(http).run
    first = http.put(f"/v1/runs/{run}/checkpoints/20", json=GOOD)
    assert first.status_code == 201
    again = http.put(f"/v1/runs/{run}/checkpoints/20", json=GOOD | {"expires_at_us": 5, "weights_version": 20})
    assert again.status_code == 200
    http.put(f"/v1/runs/{run}/checkpoints/3", json=GOOD).raise_for_status()
    page = http.get(f"/v1/runs/{run}/checkpoints", params={"limit": 1}).json()
    assert [each["step"] for each in page["items"]] == [3]
    rest = http.get(f"/v1/runs/{run}/checkpoints", params={"cursor": page["next_cursor"]}).json()
    (newest,) = rest["items"]
    assert newest == again.json()
    assert (newest["expires_at_us"], newest["format"], newest["attempt"]) == (5, "hf_safetensors", 1)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        {"path": "/etc"},
        {"path": "../other"},
        {"path": "a/../../b"},
        {"path": "a\\b"},
        {"path": ""},
        {"path": "."},
        {"path": "nul\x00"},
        {"root": "a/b"},
        {"root": ".."},
        {"root": ""},
        {"digest": "md5:abc"},
        {"format": "pickle"},
        {"weights_version": -1},
        {"expires_at_us": 2**64},
    ],
)
def test_checkpoint_outside_root_or_without_digest_is_refused(http: httpx.Client, change: dict[str, object]) -> None:
    run = start_run(http).run
    assert http.put(f"/v1/runs/{run}/checkpoints/20", json=GOOD | change).status_code == 422
    assert http.get(f"/v1/runs/{run}/checkpoints").json()["items"] == []
