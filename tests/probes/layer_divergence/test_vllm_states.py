"""Hidden states of vLLM's prefill by layer: against torch's with the same weights, and with those of another layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foreshock.digests import weights_digest
from foreshock.layer_divergence import LayerComparison
from foreshock.scorers import ENGINE_REPLAY, REFERENCE, VARIANTS
from foreshock_probes.engines.process import run_tasks
from foreshock_probes.layer_divergence.states import PART, StatesMissingError, compare_layers
from foreshock_probes.layer_divergence.vllm_states import VllmStates, _observed
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.layer_divergence.test_torch_states import GROUPED, LAYERS, means, perturbed
from tests.probes.replaying import Asked
from tests.probes.tiny import save_checkpoint

FLOAT32 = {"dtype": "float32"}


class Engine(torch.nn.Module):
    """A model of two layers that is called as vLLM calls one: with the tokens of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [torch.nn.Identity(), torch.nn.Identity()]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        states = input_ids[:, None].float()
        for layer in self.layers:
            states = layer(states)
        return states


def test_states_are_assigned_to_the_tokens_of_their_sequences() -> None:
    tokens, wanted = (
        [np.array([5, 6, 7], np.int32), np.array([5, 8], np.int32)],
        [np.array([-1, 1, 2]), np.array([0, -1])],
    )
    model, found = Engine(), np.full((4, 3), np.nan)

    def observe(place: int, at: NDArray[np.int64], states: NDArray[np.float32]) -> None:
        found[place, at] = states[:, 0]

    with _observed(model, model.layers, tokens, wanted, observe):
        model(input_ids=torch.tensor([5, 6]), positions=torch.tensor([0, 1]))
        # The rest, and a token that was generated.
        model(input_ids=torch.tensor([7, 5, 8, 9]), positions=torch.tensor([2, 0, 1, 2]))
    assert found.tolist() == [[5.0, 6.0, 7.0]] * 4
    with (
        pytest.raises(StatesMissingError, match="in another order"),
        _observed(model, model.layers, tokens, wanted, observe),
    ):
        model(input_ids=torch.tensor([5, 8]), positions=torch.tensor([0, 1]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("vllm-layers") / "plain", seed=3, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def found(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayerComparison]:
    """vLLM's prefill against torch in float32: vLLM started for each case, then torch."""
    folder = tmp_path_factory.mktemp("layers")
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "perturbed": (perturbed(weights, folder / "other", 2), FLOAT32),
        "float32": (weights, FLOAT32),
        "chunked": (weights, FLOAT32 | {"max_num_batched_tokens": 16}),
        "bfloat16": (weights, {}),
    }
    asked = {
        (name, ENGINE_REPLAY, variant): Asked(GROUPED, of_engine, ENGINE_REPLAY, variant, options)
        for name, (of_engine, options) in cases.items()
        for variant in VARIANTS
    }
    asked |= {("", REFERENCE, variant): Asked(GROUPED, weights, REFERENCE, variant) for variant in VARIANTS}
    tasks = [each.task(folder, "-".join(key), function=PART) for key, each in asked.items()]
    paths = dict(zip(asked, run_tasks(tasks, lambda task: task.result, folder).results, strict=True))
    reference = [paths["", REFERENCE, variant] for variant in VARIANTS]
    return {
        name: compare_layers(
            1,
            GROUPED,
            {ENGINE_REPLAY: [paths[name, ENGINE_REPLAY, variant] for variant in VARIANTS], REFERENCE: reference},
        )
        for name in cases
    }


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_engine_and_torch_agree_in_float32_and_depart_where_they_differ(found: dict[str, LayerComparison]) -> None:
    whole = found["float32"]
    assert (whole.states, whole.non_finite) == (GROUPED.num_tokens, 0)
    # A shift by one token, or a state without its residual, would give distances near 1.
    assert len(means(whole)) == LAYERS + 2
    assert means(whole)[0] == 0.0
    assert max(means(whole)) < 1e-5
    assert max(means(found["chunked"])) < 1e-5
    assert whole.compared_fingerprint["engine"] == "vllm"
    assert max(means(found["perturbed"])[:3]) < 1e-5
    assert min(means(found["perturbed"])[3:]) > 1e-4
    assert all(layer.departs for layer in found["perturbed"].layers[3:])
    assert found["bfloat16"].departure == "embeddings"  # the weights are rounded
    assert 1e-3 < means(found["bfloat16"])[0] < 1e-2


def test_compiled_engine_is_refused(weights: Path) -> None:
    digest = weights_digest(weights)
    request = ScoreRequest(ENGINE_REPLAY, "", GROUPED, weights, digest, options={"enforce_eager": False})
    with pytest.raises(UnsupportedScoreError, match="need tensor_parallel_size=1 and enforce_eager=true"):
        VllmStates(request, WarmModel())
