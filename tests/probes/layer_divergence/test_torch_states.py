"""Hidden states of real torch models by layer: against transformers' own, and which layer is named first."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from foreshock.digests import weights_digest
from foreshock.layer_divergence import LayerComparison
from foreshock.probe_kinds import LAYERS as LAYERS_PROBE
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.scorers import SCORERS, VARIANTS
from foreshock_probes.layer_divergence import states as states_module
from foreshock_probes.layer_divergence.states import chosen_states, compare_layers, observed_states, run_part
from foreshock_probes.layer_divergence.torch_states import TorchStates, decoder_layers
from foreshock_probes.offers import imported
from foreshock_probes.scorers.forward_pass import load_model
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel, read_arrays, write_arrays
from foreshock_probes.scorers.torch_forward import plan_of
from tests.probes.tiny import VOCABULARY, each_sequence, make_rollouts, save_checkpoint

LAYERS = 4
IN_FLOAT32: dict[str, Any] = {"autocast": None, "master_dtype": "float32"}
GROUPED = make_rollouts(24, group_ids=[f"p{row % 8}" for row in range(24)])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("layers") / "plain", seed=3, num_hidden_layers=LAYERS)


def perturbed(weights: Path, folder: Path, layer: int) -> Path:
    """Return a copy of the checkpoint with one matrix of one layer changed by 1 %."""
    save_checkpoint(folder, seed=3, num_hidden_layers=LAYERS)
    tensors = load_file(weights / "model.safetensors")
    tensors[f"model.layers.{layer}.mlp.down_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def request(
    weights: Path, scorer: str = "torch.float32", rollouts: RolloutBatch = GROUPED, **options: Any
) -> ScoreRequest:
    return ScoreRequest(scorer, "", rollouts, weights, weights_digest(weights), options=options)


def source_of(asked: ScoreRequest) -> TorchStates:
    found = imported(str(SCORERS[asked.scorer].hidden_states))(asked, WarmModel())
    assert isinstance(found, TorchStates)
    return found


def compared(
    first: TorchStates, second: TorchStates, folder: Path, rollouts: RolloutBatch = GROUPED
) -> LayerComparison:
    """Compare two sources over the same rollouts, as a worker does."""
    files: dict[str, list[Path]] = {}
    for name, source in (("first", first), ("second", second)):
        files[name] = [folder / f"{name}-{variant}" for variant in VARIANTS]
        for path, variant in zip(files[name], VARIANTS, strict=True):
            forward, done = source._forward, list[int]()
            plan = plan_of(replace(source._request, variant=variant), source._options)
            source._forward = replace(forward, plan=plan)
            states = observed_states(source, rollouts, done.append)
            source._forward = forward
            write_arrays(path, source.fingerprint, states=states)
            assert (max(done), done[-1]) == (rollouts.num_tokens, rollouts.num_tokens)
    return compare_layers(1, rollouts, files)


def means(found: LayerComparison) -> list[float]:
    values = [layer.distance.relative_l2.mean for layer in found.layers]
    return [value for value in values if value is not None]


def test_same_set_up_has_no_distance_and_no_claim(weights: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batching": "in_order", "batch_size": 5}
    one = source_of(request(weights, "torch.trainer", **IN_FLOAT32, **options))
    found = compared(one, source_of(request(weights, **options)), tmp_path)
    assert means(found) == [0.0] * (LAYERS + 2)
    assert found.departure is None
    assert found.sentence == "No layer of first and second departs beyond its noise floor."
    assert found.states == GROUPED.num_tokens


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_layer_with_other_weights_is_named_first(weights: Path, tmp_path: Path, layer: int) -> None:
    other = perturbed(weights, tmp_path / "other", layer)
    found = compared(source_of(request(other)), source_of(request(weights)), tmp_path)
    assert found.departure == f"layers.{layer}"
    # Before it the same weights give the same states: at most rounding, since the batches are equal.
    assert means(found)[: layer + 1] == [0.0] * (layer + 1)
    assert all(mean > 1e-4 for mean in means(found)[layer + 1 :])


def test_layer_in_another_precision_is_named_first(weights: Path, tmp_path: Path) -> None:
    one, other = source_of(request(weights)), source_of(request(weights))
    handle = one._layers[1].register_forward_hook(lambda layer, arguments, output: output.bfloat16().float())
    found = compared(one, other, tmp_path)
    handle.remove()
    assert found.departure == "layers.1"
    mean = found.layers[2].distance.relative_l2.mean
    assert mean is not None
    # Rounding to 8 bits: at most 2^-9 per feature, uniformly distributed 2^-9/√3.
    assert 2e-4 < mean < 2**-8


@pytest.mark.parametrize(
    "options", [{"padding": "left"}, {"padding": "none"}, {"batching": "in_order", "batch_size": 1}]
)
def test_tokens_of_other_batches_meet(weights: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    found = compared(source_of(request(weights, **options)), source_of(request(weights)), tmp_path)
    # A shift by one token would give distances near 1.
    assert max(means(found)) < 1e-5
    assert found.non_finite == 0


def gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=2, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [lambda folder: save_checkpoint(folder, 3, num_hidden_layers=LAYERS), gpt2])
def test_states_are_those_that_transformers_returns(make: Callable[[Path], Path], tmp_path: Path) -> None:
    weights, rollouts = make(tmp_path / "model"), make_rollouts(6, seed=4)
    source, expected = source_of(request(weights, rollouts=rollouts)), np.zeros((LAYERS + 2, rollouts.num_tokens, 32))
    found = np.full_like(expected, np.nan)

    def observe(place: int, at: NDArray[np.int64], states: NDArray[np.float32]) -> None:
        found[place, at] = states

    chosen = chosen_states(rollouts, source.places, source.size)
    assert chosen.tolist() == list(range(rollouts.num_tokens))
    source.run(chosen, observe, lambda done: None)  # all are chosen, so their numbers are their indices
    model = load_model(weights, torch.float32, "sdpa", torch.device("cpu"))
    for ids, prompt, tokens in each_sequence(rollouts):
        with torch.no_grad():
            hidden = [each[0].numpy() for each in model(ids, output_hidden_states=True).hidden_states]
        for place in (*range(LAYERS), LAYERS + 1):
            of_place = hidden[min(place, LAYERS)]  # the last one is after the final norm
            expected[place, tokens] = of_place[prompt - 1 : -1]
    known = [*range(LAYERS), LAYERS + 1]
    np.testing.assert_allclose(found[known], expected[known], rtol=1e-4, atol=1e-5)
    assert np.isfinite(found[LAYERS]).all()


def test_few_states_are_an_even_selection(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(request(weights))
    monkeypatch.setattr(states_module, "STATES_BYTES", 40 * 4 * source.places * source.size)
    tokens = chosen_states(GROUPED, source.places, source.size)
    assert tokens.size == 40
    assert set(np.diff(tokens)) <= {GROUPED.num_tokens // 40, GROUPED.num_tokens // 40 + 1}
    other = perturbed(weights, tmp_path / "other", 2)
    found = compared(source_of(request(other)), source, tmp_path)
    assert (found.states, found.tokens) == (40, GROUPED.num_tokens)
    for path in tmp_path.glob("*-*"):
        assert read_arrays(path)[0]["states"].shape == (source.places, 40, source.size)
    assert found.departure == "layers.2"


def test_tokens_that_the_model_did_not_sample_are_left_out(weights: Path) -> None:
    masks = [np.arange(length) % 2 for length in GROUPED.response_lengths.tolist()]
    masked = replace(GROUPED, response_mask=np.concatenate(masks).astype(np.uint8))
    tokens = chosen_states(masked, 3, 4)
    assert tokens.tolist() == np.flatnonzero(np.concatenate(masks)).tolist()


def test_model_without_a_decoder_stack_is_refused() -> None:
    class Flat(torch.nn.Module):
        def get_decoder(self) -> torch.nn.Module:
            return self

    with pytest.raises(UnsupportedScoreError, match="Flat has no list of decoder layers"):
        decoder_layers(Flat())


def test_scorer_without_hidden_states_is_refused(weights: Path) -> None:
    asked = request(weights, "torch.own")
    with pytest.raises(UnsupportedScoreError, match=r"torch\.own gives no hidden states; scorers that do: "):
        run_part(asked, WarmModel(), lambda done: None)
    assert {"torch.trainer", "torch.bfloat16", "torch.float32"} <= set(LAYERS_PROBE.usable_scorers())
    assert all(SCORERS[name].implementation is not None for name in LAYERS_PROBE.usable_scorers())


def test_other_networks_are_refused(weights: Path, tmp_path: Path) -> None:
    smaller = save_checkpoint(tmp_path / "smaller", seed=3, num_hidden_layers=2)
    with pytest.raises(UnsupportedScoreError, match="4 layers of 32 features and 2 of 32"):
        compared(source_of(request(weights)), source_of(request(smaller)), tmp_path)


def test_state_that_does_not_come_once_is_an_error(weights: Path) -> None:
    source = source_of(request(weights))
    source._layers = torch.nn.ModuleList([*source._layers[:-1], torch.nn.Identity()])  # the last layer's never comes
    with pytest.raises(states_module.StatesMissingError, match="did not come once"):
        observed_states(source, GROUPED, lambda done: None)


def test_rollouts_without_tokens_are_refused(weights: Path) -> None:
    empty = RolloutBatch.from_lists(["a"], [[1, 2]], [[]])
    with pytest.raises(UnsupportedScoreError, match="no tokens to compare hidden states at"):
        observed_states(source_of(request(weights, rollouts=empty)), empty, lambda done: None)


def test_truncation_at_sampling_has_no_effect(weights: Path) -> None:
    attributes = BatchAttributes(logprobs_mode="processed_logprobs", top_p=0.9, temperature=0.7)
    source = source_of(request(weights, "torch.trainer", make_rollouts(4, attributes=attributes)))
    assert source.fingerprint.temperature == 1.0  # that of the logits, which are not computed
