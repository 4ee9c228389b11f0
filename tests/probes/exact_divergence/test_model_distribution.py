"""Divergences of two real models at the states of rollouts equal those of all their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Gemma2Config, Gemma2ForCausalLM

from benchmarks.recorded_runs import shipped_run
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock_probes.exact_divergence import ExactDivergences, GivenLogits, exact_divergences
from foreshock_probes.exact_divergence.model_distribution import ModelDistribution, exact_divergences_of_models, head_of
from foreshock_probes.scorers.forward_pass import load_model
from foreshock_probes.scorers.request import UnsupportedScoreError
from tests.paths import RECORDED
from tests.probes.held import K3_ON_LOWER_CPU, HeldProcess
from tests.probes.tiny import make_rollouts, save_checkpoint


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, dtype, "sdpa", torch.device("cpu"))


def rollouts_with_prompts(count: int = 7) -> RolloutBatch:
    return make_rollouts(count, seed=3)


def all_logits(distribution: ModelDistribution, rollouts: RolloutBatch) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return the logits [T, V] of each rollout alone, unpadded, by the model's own head; and the T tokens."""
    logits, tokens = [], []
    for row in range(rollouts.num_rollouts):
        prompt = rollouts.prompt_token_ids[slice(*rollouts.prompt_offsets[row : row + 2])]
        response = rollouts.response_token_ids[slice(*rollouts.response_offsets[row : row + 2])]
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
        with torch.no_grad():
            own = distribution.model(ids).logits[0].float() / distribution.temperature
        logits.append(own[prompt.size - 1 : -1])
        tokens.append(response)
    return torch.cat(logits), np.concatenate(tokens).astype(np.int64)


def test_states_are_those_before_the_response_tokens(checkpoints: Path) -> None:
    distributions = (
        ModelDistribution(model_of(checkpoints / "second")),
        ModelDistribution(model_of(checkpoints / "first"), temperature=1.3),
    )
    rollouts = rollouts_with_prompts()
    found = exact_divergences_of_models(*distributions, rollouts, batch_size=3, top_ks=(1, 4))
    (target, tokens), (behaviour, _) = (all_logits(distribution, rollouts) for distribution in distributions)
    expected = exact_divergences(GivenLogits(target), GivenLogits(behaviour), token_ids=tokens, top_ks=(1, 4))
    assert found.tokens == rollouts.num_tokens
    assert expected.kl.mean() > 0.1
    for name in ("kl", "reverse_kl", "tv", "chi2", "target_entropy", "target_log_probs", "behaviour_log_probs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=2e-3, atol=2e-4, err_msg=name)
    np.testing.assert_array_equal(found.topk_overlap[:, 0] == 0.0, found.top1_flip)


def test_float32_against_bfloat16_is_a_small_mismatch() -> None:
    batch = decode_rollouts((RECORDED / "rollouts" / "step_0160.parquet").read_bytes())
    rollouts = batch.select(np.arange(24))
    folder = RECORDED / "checkpoints" / "step_0160"
    plain, half = model_of(folder), model_of(folder, torch.bfloat16)
    found = exact_divergences_of_models(ModelDistribution(plain), ModelDistribution(half), rollouts)
    assert 1e-6 < found.kl.mean() < 1e-3
    assert 0.0 < found.delta_max < 0.2
    trainer = exact_divergences_of_models(
        ModelDistribution(plain, autocast=torch.bfloat16), ModelDistribution(plain), rollouts
    )
    assert 1e-6 < trainer.kl.mean() < 1e-3


def autocast_against_itself(rollouts: RolloutBatch) -> ExactDivergences:
    distribution = ModelDistribution(model_of(RECORDED / "checkpoints" / "step_0045"), autocast=torch.bfloat16)
    return exact_divergences_of_models(distribution, distribution, rollouts)


def test_trainer_log_probs_are_those_of_autocast(recorder: HeldProcess) -> None:
    batch = decode_rollouts((RECORDED / "rollouts" / "step_0045.parquet").read_bytes())
    rollouts = batch.select(np.arange(24))
    found = recorder.call(autocast_against_itself, rollouts)
    assert found.kl.tolist() == [0.0] * rollouts.num_tokens
    assert rollouts.trainer_log_probs is not None
    assert found.target_log_probs is not None
    d = found.target_log_probs - rollouts.trainer_log_probs
    if recorder.stands_for(shipped_run().environment):
        assert np.abs(d).max() <= 1e-4
    else:
        assert np.mean(np.expm1(d) - d) < K3_ON_LOWER_CPU


def test_a_tied_head_is_found(tmp_path: Path) -> None:
    model = model_of(save_checkpoint(tmp_path / "tied", seed=3, tie_word_embeddings=True))
    assert head_of(model).weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    rollouts = rollouts_with_prompts(2)
    assert exact_divergences_of_models(ModelDistribution(model), ModelDistribution(model), rollouts).delta_max == 0.0


def test_a_model_that_scales_its_logits_is_refused(checkpoints: Path) -> None:
    model = model_of(checkpoints / "first")
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden) * 0.5
    with pytest.raises(UnsupportedScoreError, match="after the head"):
        exact_divergences_of_models(ModelDistribution(model), ModelDistribution(model), rollouts_with_prompts(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_capped_model_has_the_distribution_of_its_own_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    configuration = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=1.0)
    configuration.final_logit_softcapping = 5.0
    model = Gemma2ForCausalLM(configuration).to(dtype).eval()
    distribution, ids = ModelDistribution(model), torch.arange(1, 20)[None]
    assert head_of(model).softcap == 5.0
    with torch.no_grad():
        own = GivenLogits(model(input_ids=ids).logits[0])
        found = exact_divergences(own, distribution.source(distribution.hidden(ids)[0]))
    assert own.logits.abs().max() > 4.5
    # At most one product is rounded to the other side; steps rounded to another dtype would give 2e-5.
    assert found.kl.mean() < (1e-12 if dtype == torch.float32 else 2e-6)


def test_a_model_in_training_mode_is_refused(checkpoints: Path) -> None:
    distribution = ModelDistribution(model_of(checkpoints / "first").train())
    with pytest.raises(UnsupportedScoreError, match="training mode"):
        exact_divergences_of_models(distribution, distribution, rollouts_with_prompts(2))


def test_tokens_of_another_model_are_refused(checkpoints: Path) -> None:
    distribution = ModelDistribution(model_of(checkpoints / "first"))
    with pytest.raises(UnsupportedScoreError, match=r"`response_token_ids` has the id 24, and the .* 24"):
        exact_divergences_of_models(distribution, distribution, RolloutBatch.from_lists(["a"], [[1]], [[2, 24]]))


def test_a_rollout_without_a_prompt_is_refused(checkpoints: Path) -> None:
    distribution = ModelDistribution(model_of(checkpoints / "first"))
    with pytest.raises(UnsupportedScoreError, match="rollout 1 has no prompt"):
        exact_divergences_of_models(
            distribution, distribution, RolloutBatch.from_lists(["a", "b"], [[1], []], [[2], [3]])
        )
