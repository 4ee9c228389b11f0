"""Checkpoints: announced, announced again, and restricted to their root."""

from __future__ import annotations

import httpx

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
