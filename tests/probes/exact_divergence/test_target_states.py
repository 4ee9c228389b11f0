"""The logits of a model's written states are its own; a model whose logits are no head of its states is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from foreshock.digests import weights_digest
from foreshock_probes.exact_divergence.divergences import exact_divergences
from foreshock_probes.exact_divergence.pairs import target_logits, write_target
from foreshock_probes.scorers.forward_pass import check_logits, load_model
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.tiny import VOCABULARY, make_rollouts, plain_logits, save_checkpoint


def differences(folder: Path, into: Path, dtype: torch.dtype) -> torch.Tensor:
    """Return KL of the model's logits against those of the states that it wrote, both in `dtype`."""
    rollouts = make_rollouts(8)
    name = str(dtype).removeprefix("torch.")
    options = {"autocast": None, "master_dtype": name, "batch_size": 1}
    request = ScoreRequest("torch.trainer", "", rollouts, folder, weights_digest(folder), options=options)
    write_target(request, into, WarmModel(), lambda tokens: None)
    own = plain_logits(load_model(folder, dtype, "sdpa", torch.device("cpu")), rollouts)
    states = load_file(into)
    found = target_logits({**states, "divisor": torch.tensor(1.0)}, torch.arange(rollouts.num_tokens))
    ids = torch.from_numpy(rollouts.response_token_ids.astype(np.int64))
    return exact_divergences(own, found, ids)["kl"]


@pytest.mark.parametrize("tied", [True, False])
def test_written_states_have_the_distribution_of_the_model(tmp_path: Path, tied: bool) -> None:
    folder = save_checkpoint(tmp_path / "weights", seed=3, tie_word_embeddings=tied)
    assert differences(folder, tmp_path / "states", torch.float32).max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_capped_model_has_the_distribution_of_its_own_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    configuration = Gemma2Config(
        **sizes, vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=1, initializer_range=1.0
    )
    configuration.final_logit_softcapping = 5.0
    Gemma2ForCausalLM(configuration).save_pretrained(tmp_path / "weights")
    found = differences(tmp_path / "weights", tmp_path / "states", dtype)
    assert load_file(tmp_path / "states")["softcap"] == 5.0
    # At most one product is rounded to the other side; steps rounded to another dtype would give 2e-5.
    assert found.mean() < (1e-12 if dtype == torch.float32 else 2e-6)


def test_a_model_that_changes_its_logits_after_the_head_is_refused(checkpoints: Path) -> None:
    model = load_model(checkpoints / "first", torch.float32, "sdpa", torch.device("cpu"))
    plain = model.forward

    def scaled(*arguments: object, **named: object) -> object:
        found = plain(*arguments, **named)
        found.logits *= 0.5
        return found

    model.forward = scaled
    with torch.no_grad(), pytest.raises(UnsupportedScoreError, match="after the head"):
        check_logits(model, torch.arange(1, 20)[None])
