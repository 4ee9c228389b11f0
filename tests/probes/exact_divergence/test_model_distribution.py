"""The distribution of a real model, computed from its states and its head, is that of all its logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from foreshock_probes.exact_divergence import GivenLogits, exact_divergences
from foreshock_probes.exact_divergence.model_distribution import ModelDistribution, head_of
from foreshock_probes.scorers.forward_pass import load_model
from foreshock_probes.scorers.request import UnsupportedScoreError
from tests.probes.tiny import save_checkpoint

IDS = torch.arange(1, 20)[None]


def model_of(folder: Path) -> Any:
    return load_model(folder, torch.float32, "sdpa", torch.device("cpu"))


def test_a_tied_head_is_found(tmp_path: Path) -> None:
    model = model_of(save_checkpoint(tmp_path / "tied", seed=3, tie_word_embeddings=True))
    assert head_of(model).weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    with torch.no_grad():
        ModelDistribution(model).check(IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_capped_model_has_the_distribution_of_its_own_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    configuration = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=1.0)
    configuration.final_logit_softcapping = 5.0
    model = Gemma2ForCausalLM(configuration).to(dtype).eval()
    distribution = ModelDistribution(model)
    assert head_of(model).softcap == 5.0
    with torch.no_grad():
        own = GivenLogits(model(input_ids=IDS).logits[0])
        found = exact_divergences(own, distribution.source(distribution.hidden(IDS)[0]))
    assert own.given.abs().max() > 4.5
    # At most one product is rounded to the other side; steps rounded to another dtype would give 2e-5.
    assert found.kl.mean() < (1e-12 if dtype == torch.float32 else 2e-6)


def test_what_has_no_exact_divergence_is_refused(checkpoints: Path) -> None:
    training, scaled = (model_of(checkpoints / "first") for _ in range(2))
    training.train()
    head = scaled.lm_head.forward
    scaled.lm_head.forward = lambda hidden: head(hidden) * 0.5
    for model, message in ((training, "training mode"), (scaled, "after the head")):
        with torch.no_grad(), pytest.raises(UnsupportedScoreError, match=message):
            ModelDistribution(model).check(IDS)
