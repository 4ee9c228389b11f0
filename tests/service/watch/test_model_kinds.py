"""Alerts and advice judge a run by the kind of its model: declared, derived from a checkpoint, or unknown."""

import math
from typing import Any

import httpx
import numpy as np

from foreshock.learning_rate.control_loop import LARGEST_RISE
from foreshock.rollouts import RolloutBatch
from tests.service.sending import Sender, log_probs_of, make_batch, start_run
from tests.service.working import announce_checkpoint

# Nats per token: the second one is a warning for a mixture of experts and critical for a dense model.
BASELINE, RISEN = 2.5e-3, 2.5e-2
STEPS = 40
FAR = 0.3
"""|d| of the tokens that differ."""
ROLLOUTS = 60


def batch_with_k3(step: int, k3: float) -> RolloutBatch:
    """Return rollouts whose mean k3 is about `k3`: as in real runs, few tokens make most of it."""
    # Improbable tokens: the difference of the probabilities stays small.
    behaviour = np.minimum(log_probs_of(make_batch(ROLLOUTS, seed=step))[0], -3.0).astype(np.float32)
    differing = np.arange(max(1, round(behaviour.size * k3 / (math.cosh(FAR) - 1.0))))
    target = behaviour.copy()
    target[differing] += np.where(differing % 2, -FAR, FAR).astype(np.float32)
    return make_batch(ROLLOUTS, seed=step, rollout_log_probs=behaviour, trainer_log_probs=target)


def send_rising_mismatch(http: httpx.Client, key: str, **fields: Any) -> Sender:
    """Send a run whose mismatch rises to ten times its baseline at step 11, in mode apply."""
    run = start_run(http, key, advice_mode="apply", **fields)
    for step in range(1, STEPS + 1):
        k3 = BASELINE if step <= 10 else RISEN
        run.put_shard(step, batch_with_k3(step, k3)).raise_for_status()
    return run


def scale_of(run: Sender) -> float:
    scale: float = run.get("lr-advice", step=STEPS + 1).raise_for_status().json()["scale"]
    return scale


def open_rules(run: Sender) -> dict[str, dict[str, Any]]:
    return {alert["rule"]: alert for alert in run.get("alerts", state="open").raise_for_status().json()["items"]}


def test_learning_rate_of_experts_is_not_lowered_by_the_ranges_of_a_dense_model(http: httpx.Client) -> None:
    dense = send_rising_mismatch(http, "dense", model_kind="dense")
    experts = send_rising_mismatch(http, "experts", model_kind="moe")
    assert (scale_of(dense) < 0.7, scale_of(experts)) == (True, 1.0)
    assert "mismatch_runaway" in open_rules(dense)
    found = set(open_rules(experts))
    assert "mismatch_warning" in found
    assert found.isdisjoint({"mismatch_runaway", "mismatch_critical"})


def test_declaring_the_kind_derives_the_alerts_again(http: httpx.Client) -> None:
    run = send_rising_mismatch(http, "declared-late")
    address = f"/v1/runs/{run.run}"
    # Until then it is judged as dense.
    assert "mismatch_runaway" in open_rules(run)
    assert "healthy for a dense model" in open_rules(run)["mismatch_critical"]["why"]
    assert "the kind of model is not declared" in str(run.get("diagnosis").json()["missing"])
    lowered = scale_of(run)
    assert lowered < 0.7
    changed = http.patch(address, json={"model_kind": "moe"}).raise_for_status().json()
    assert (changed["model_kind"], changed["model_kind_source"]) == ("moe", "declared")
    found = set(open_rules(run))
    assert "mismatch_warning" in found
    assert found.isdisjoint({"mismatch_runaway", "mismatch_critical"})
    states = {alert["rule"]: alert["state"] for alert in run.get("alerts").json()["items"]}
    assert states["mismatch_runaway"] == "retracted"
    # The loop takes back what it has lowered, slowly.
    assert lowered <= scale_of(run) <= lowered * math.exp(10 * LARGEST_RISE)
    # Up to the number of steps that are derived in a transaction.
    for step in range(STEPS + 1, STEPS + 10):
        run.put_shard(step, batch_with_k3(step, RISEN)).raise_for_status()
    assert lowered <= scale_of(run) <= lowered * math.exp(20 * LARGEST_RISE)
    http.patch(address, json={"model_kind": None}).raise_for_status()
    assert "mismatch_runaway" in open_rules(run)


def test_the_kind_is_derived_from_an_announced_checkpoint_unless_it_is_declared(http: httpx.Client) -> None:
    run = send_rising_mismatch(http, "derived")

    def kind() -> tuple[str | None, str | None]:
        found = http.get(f"/v1/runs/{run.run}").raise_for_status().json()
        return found["model_kind"], found["model_kind_source"]

    announce_checkpoint(run, 1).raise_for_status()
    assert kind() == (None, None)
    announce_checkpoint(run, 2, model_kind="moe").raise_for_status()
    assert kind() == ("moe", "checkpoint")
    assert "mismatch_runaway" not in open_rules(run)
    # A checkpoint whose configuration is unknown changes nothing.
    announce_checkpoint(run, 3).raise_for_status()
    assert kind() == ("moe", "checkpoint")
    http.patch(f"/v1/runs/{run.run}", json={"model_kind": "dense"}).raise_for_status()
    announce_checkpoint(run, 4, model_kind="moe").raise_for_status()
    assert kind() == ("dense", "declared")
    assert "mismatch_runaway" in open_rules(run)
    http.patch(f"/v1/runs/{run.run}", json={"model_kind": None}).raise_for_status()
    assert kind() == ("moe", "checkpoint")


def test_a_resumed_trainer_may_declare_what_the_first_did_not(http: httpx.Client) -> None:
    body = {"key": "resumed"}
    assert http.post("/v1/runs", json=body).raise_for_status().json()["model_kind"] is None
    assert http.post("/v1/runs", json=body | {"model_kind": "moe"}).raise_for_status().json()["model_kind"] == "moe"
    # What a run declared is changed by PATCH only.
    assert http.post("/v1/runs", json=body | {"model_kind": "dense"}).raise_for_status().json()["model_kind"] == "moe"
