"""Routes in torch equal those of the model's own router logits; a known perturbation shows in its layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foreshock.digests import weights_digest
from foreshock.measures.routing import UNKNOWN_EXPERT, RoutingMeasures
from foreshock.probe_kinds import ROUTING
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import SCORERS
from foreshock_probes.offers import load_scorer
from foreshock_probes.routing import recorded
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.tiny import each_sequence, make_rollouts, save_checkpoint, save_mixture_of_experts

LAYERS, TOP_K = 4, 2
FLOAT32: dict[str, Any] = {"autocast": None, "master_dtype": "float32"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture_of_experts(tmp_path_factory.mktemp("experts"), seed=1, layers=LAYERS)


def request_of(folder: Path, rollouts: RolloutBatch, scorer: str, variant: str, options: dict[str, Any]) -> Any:
    return ScoreRequest(scorer, variant, rollouts, folder, weights_digest(folder), 7, options)


def record(
    tmp_path: Path, folder: Path, rollouts: RolloutBatch, scorer: str, variant: str = "", **options: Any
) -> recorded.RecordedRoutes:
    request = replace(request_of(folder, rollouts, scorer, variant, options), result=tmp_path / "routes")
    recorded.run_part(request, WarmModel(), lambda tokens: None)
    return recorded.read_routes(tmp_path / "routes")


def compared(
    rollouts: RolloutBatch, target: recorded.RecordedRoutes, behaviour: recorded.RecordedRoutes
) -> RoutingMeasures:
    return recorded.compare_routes(rollouts, target, behaviour, ("target", "behaviour")).measures


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": "left"}, {"padding": "none"}, {"batch_size": 3, "batching": "in_order"}, {"logits_bytes": 512}],
)
def test_routes_are_those_of_the_router_logits(tmp_path: Path, weights: Path, options: dict[str, Any]) -> None:
    rollouts = make_rollouts(12)
    found = record(tmp_path, weights, rollouts, "torch.float32", **options)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    assert found.layers == tuple(range(LAYERS))
    assert found.experts.shape == (rollouts.num_tokens, LAYERS, TOP_K)
    for ids, prompt, tokens in each_sequence(rollouts):
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        for layer in range(LAYERS):
            expected = logits[layer].topk(TOP_K).indices.sort().values[prompt - 1 : -1].numpy()
            np.testing.assert_array_equal(np.sort(found.experts[tokens, layer], axis=1), expected)


@pytest.mark.parametrize("scorer", [name for name in ROUTING.usable_scorers() if SCORERS[name].engine == "torch"])
def test_log_probs_are_those_of_the_scorer(tmp_path: Path, weights: Path, scorer: str) -> None:
    rollouts = make_rollouts(12)
    request = request_of(weights, rollouts, scorer, "", {})
    scored = load_scorer(scorer)(request, WarmModel(), lambda tokens: None)
    found = record(tmp_path, weights, rollouts, scorer)
    assert found.log_probs.tobytes() == scored.log_probs.tobytes()
    assert found.fingerprint == scored.fingerprint


def test_equal_precision_agrees_and_another_one_does_not(tmp_path: Path, weights: Path) -> None:
    rollouts = make_rollouts(40)
    reference = record(tmp_path, weights, rollouts, "torch.float32")
    same = compared(rollouts, record(tmp_path, weights, rollouts, "torch.trainer", **FLOAT32), reference)
    assert [each.agreement.mean for each in same.layers] == [1.0] * LAYERS
    assert (same.any_difference.mean, same.differing.tokens) == (0.0, 0)
    floor = compared(rollouts, record(tmp_path, weights, rollouts, "torch.float32", "rebatched"), reference)
    assert floor.any_difference.mean == 0.0
    other = compared(rollouts, record(tmp_path, weights, rollouts, "torch.bfloat16"), reference)
    assert 0.0 < other.any_difference.mean < 1.0
    assert other.all_tokens.tokens == rollouts.num_tokens
    # Tokens that run through other experts differ by more than rounding.
    assert other.differing.abs_d.mean > 2 * other.agreeing.abs_d.mean > 0.0


def test_perturbed_router_departs_in_its_layer_first(tmp_path: Path, weights: Path) -> None:
    rollouts = make_rollouts(40)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        gate = model.model.layers[2].mlp.gate.weight
        gate += 0.3 * gate.std() * torch.randn_like(gate)
    model.save_pretrained(tmp_path / "perturbed")
    found = compared(
        rollouts,
        record(tmp_path, tmp_path / "perturbed", rollouts, "torch.float32"),
        record(tmp_path, weights, rollouts, "torch.float32"),
    )
    first, second, third, last = found.layers
    assert (first.agreement.mean, second.agreement.mean, first.overlap.mean, second.overlap.mean) == (1, 1, 1, 1)
    assert third.agreement.mean < third.overlap.mean < 1.0
    assert third.first_differences.mean == pytest.approx(1.0 - third.agreement.mean)
    # Other experts in layer 2 change the states that the router of layer 3 sees.
    assert last.agreement.mean < 1.0
    assert found.any_difference.mean == pytest.approx(third.first_differences.mean + last.first_differences.mean)
    assert found.differing.k3_kl.mean > found.agreeing.k3_kl.mean


def test_first_token_without_a_prompt_has_no_experts(tmp_path: Path, weights: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b"], [[], [3]], [[1, 2, 3], [4, 5]])
    found = record(tmp_path, weights, rollouts, "torch.float32")
    assert (found.experts[0] == UNKNOWN_EXPERT).all()
    assert (found.experts[1:] >= 0).all()
    measures = compared(rollouts, found, found)
    assert (measures.all_tokens.tokens, measures.excluded) == (4, 1)


def test_dense_model_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "dense", seed=1)
    with pytest.raises(UnsupportedScoreError, match="Qwen3ForCausalLM has no routed experts"):
        record(tmp_path, folder, make_rollouts(3), "torch.float32")


def test_scorer_without_routes_is_refused(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(UnsupportedScoreError, match=r"torch\.own cannot record routed experts"):
        record(tmp_path, weights, make_rollouts(3), "torch.own")


def test_other_layers_or_counts_are_not_compared(tmp_path: Path, weights: Path) -> None:
    rollouts = make_rollouts(3)
    found = record(tmp_path, weights, rollouts, "torch.float32")
    others = (
        replace(found, layers=found.layers[1:], experts=found.experts[:, 1:]),
        replace(found, experts=found.experts[:, :, :1]),
    )
    for other in others:
        with pytest.raises(recorded.RoutesDifferError, match="cannot be compared"):
            recorded.compare_routes(rollouts, found, other, ("torch.trainer", "vllm.prefill"))


def test_routes_that_would_fill_memory_are_refused() -> None:
    with pytest.raises(UnsupportedScoreError, match=r"need 732 MiB.*max_rollouts"):
        recorded.empty_routes(1_000_000, 48, 8)
