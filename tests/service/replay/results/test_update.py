"""Measurements of updates over HTTP: which weights they need, what a worker sends, and what is read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foreshock.api.records import parse
from foreshock.diagnosis.update_noise import UpdateToNoise
from foreshock.layer_divergence import Mean
from foreshock.probe_kinds import UPDATE
from tests.service.sending import Sender
from tests.service.working import EVERYTHING, STEP, WEIGHTS, announce_checkpoint, take_lease

AFTER = "sha256:" + "cd" * 32
ABLE = (*EVERYTHING, UPDATE.capability)


def ask(run: Sender, **fields: Any) -> httpx.Response:
    return run.http.post(f"/v1/runs/{run.run}/probes", json={"step": STEP, "kind": "update", **fields})


def found(**changes: Any) -> dict[str, Any]:
    mean = {"mean": 1e-3, "low": 5e-4, "high": 2e-3}
    body = {
        "step": STEP, "after_step": STEP + 1, "scorer": "torch.trainer", "rollouts": 12, "tokens": 80,
        "update_k3": mean, "floor_k3": {**mean, "mean": 1e-5}, "rewarded": 4, "rewarded_groups": 4,
        "rewarded_change": {"mean": None, "low": None, "high": None}, "others_change": mean,
        "before_fingerprint": {"engine": "torch", "weights_digest": WEIGHTS}, "after_fingerprint": {"engine": "torch"},
    }  # fmt: skip
    return body | changes


def test_update_needs_the_weights_of_the_next_step_or_of_a_named_later_one(run: Sender) -> None:
    missing = ask(run)
    assert missing.status_code == 422
    assert f"needs the weights of step {STEP + 1} too" in missing.json()["detail"]
    announce_checkpoint(run, STEP + 10, AFTER)
    assert ask(run).status_code == 422
    assert ask(run, checkpoint_step=STEP).status_code == 422
    named = ask(run, checkpoint_step=STEP + 10).raise_for_status().json()
    announce_checkpoint(run, STEP + 1, AFTER)
    following = ask(run).raise_for_status().json()
    assert named["id"] != following["id"] == ask(run, checkpoint_step=STEP + 1).json()["id"]


def test_worker_gets_both_weights_and_its_measurement_is_read(run: Sender, http: httpx.Client) -> None:
    announce_checkpoint(run, STEP + 1, AFTER)
    assert run.get(f"steps/{STEP}/update").status_code == 404
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    job = holder.lease["job"]
    assert job["checkpoint"]["digest"] == WEIGHTS
    assert [(each["step"], each["digest"]) for each in job["candidates"]] == [(STEP + 1, AFTER)]
    headers = {"X-Foreshock-Lease-Token": str(holder.token)}

    def put(body: dict[str, Any]) -> httpx.Response:
        return http.put(f"{holder.url}/update", json=body, headers=headers)

    for wrong in ({"after_step": STEP + 2}, {"step": 1}, {"scorer": "vllm.prefill"},
                  {"before_fingerprint": {"weights_digest": AFTER}}):  # fmt: skip
        assert put(found(**wrong)).status_code == 422
    put(found()).raise_for_status()
    assert run.get(f"steps/{STEP}/update").status_code == 404
    holder.complete().raise_for_status()
    read = parse(UpdateToNoise, run.get(f"steps/{STEP}/update").raise_for_status().json())
    assert read.ratio == pytest.approx(100.0)
    assert read.rewarded_change == Mean(None, None, None)
