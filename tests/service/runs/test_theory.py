"""The theory of a step over HTTP, with and without the scalars of the trainer."""

import httpx
import pytest

from tests.service.sending import Sender, make_batch, start_run

GRADIENTS: dict[str, float | None] = {
    "grad_norm_micro_batch": 2.0, "grad_norm_batch": 1.0, "micro_batch_prompts": 1.0, "batch_prompts": 8.0,
}  # fmt: skip


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    sender = start_run(http, initial_learning_rate=1e-3)
    sender.put_shard(0, make_batch(12)).raise_for_status()
    return sender


def test_gradient_norms_give_step_noise(sender: Sender) -> None:
    sender.put_scalars(0, GRADIENTS).raise_for_status()
    answer = sender.get("steps/0/theory", gradient_bound=2.0).raise_for_status().json()
    variance = 3.0 / (1 - 1 / 8)
    assert answer["gradient_missing"] is None
    assert answer["gradient"]["variance"] == pytest.approx(variance)
    noise = answer["step_noise"]
    assert noise["at_learning_rate"] == pytest.approx(0.5e-6 * variance / 8)
    assert noise["at_learning_rate"] == 4 * noise["at_half"]
    with_bias = answer["step_noise_with_bias"]
    assert with_bias["bias_norm"] == pytest.approx(2 * answer["bias"]["per_unit"])
    assert with_bias["at_learning_rate"] > noise["at_learning_rate"]
    sender.put_scalars(0, {"lr": 5e-4}).raise_for_status()
    # This bound of the bias overflows a float64.
    too_large = sender.get("steps/0/theory", gradient_bound=1e308).raise_for_status().json()
    assert too_large["step_noise_with_bias"]["at_learning_rate"] is None
    halved = sender.get("steps/0/theory").json()
    assert (halved["learning_rate"], halved["learning_rate_source"]) == (5e-4, "the step's scalar lr")
    assert halved["step_noise"]["at_learning_rate"] == pytest.approx(noise["at_half"])
    assert halved["step_noise_with_bias"] is None


def test_applied_learning_rate_precedes_initial_one(sender: Sender) -> None:
    sender.put_scalars(0, GRADIENTS).raise_for_status()
    at_first = sender.get("steps/0/theory").raise_for_status().json()["step_noise"]["at_learning_rate"]
    for step, rate in ((0, 5e-4), (1, 2.5e-4)):
        body = {"revision": 0, "step": step, "applied_lr": rate}
        sender.http.post(f"/v1/runs/{sender.run}/lr-advice/ack", json=body).raise_for_status()
    answer = sender.get("steps/0/theory").json()
    assert (answer["learning_rate"], answer["learning_rate_source"]) == (5e-4, "what the trainer applied at step 0")
    assert answer["step_noise"]["at_learning_rate"] == pytest.approx(at_first / 4)
    sender.put_shard(2, make_batch(12)).raise_for_status()
    later = sender.get("steps/2/theory").raise_for_status().json()
    assert (later["learning_rate"], later["learning_rate_source"]) == (2.5e-4, "what the trainer applied at step 1")


def test_invalid_norms_are_reported_and_other_bounds_returned(sender: Sender) -> None:
    for name, value in (("batch_prompts", 1.0), ("grad_norm_micro_batch", 1e200)):
        sender.put_scalars(0, GRADIENTS | {name: value}).raise_for_status()
        answer = sender.get("steps/0/theory").raise_for_status().json()
        assert answer["gradient"] is None
        assert answer["gradient_missing"].startswith(f"the scalar {name} is invalid: ")
        assert answer["bias"]["per_unit"] is not None


def test_an_exact_divergence_gives_the_horizon_bound(sender: Sender) -> None:
    answer = sender.get("steps/0/theory", delta_max=0.001).raise_for_status().json()
    longest = answer["bias"]["longest"]
    assert answer["horizon"]["value"] == pytest.approx(0.002 * longest**2)
    assert not answer["horizon"]["vacuous"]
    assert sender.get("steps/0/theory", delta_max=1.0).json()["horizon"]["vacuous"]


def test_invalid_query_is_refused(sender: Sender) -> None:
    for query in ("delta_max=1.5", "delta_max=nan", "gradient_bound=-1", "gradient_bound=inf", "comparison=rollout"):
        refused = sender.get(f"steps/0/theory?{query}")
        assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json")
