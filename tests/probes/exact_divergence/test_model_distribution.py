"""Divergences of two real models at the states of rollouts equal those of all their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from benchmarks.recorded_runs import shipped_run
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock_probes.exact_divergence import ExactDivergences, GivenLogits, exact_divergences
from foreshock_probes.exact_divergence.model_distribution import ModelDistribution, exact_divergences_of_models, head_of
from foreshock_probes.scorers.forward_pass import load_model
from foreshock_probes.scorers.request import UnsupportedScoreError
from tests.paths import RECORDED
from tests.probes.held import K3_ON_LOWER_CPU, HeldProcess
from tests.probes.tiny import make_rollouts, plain_logits, save_checkpoint


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, dtype, "sdpa", torch.device("cpu"))


def rollouts_with_prompts(count: int = 7) -> RolloutBatch:
    return make_rollouts(count, seed=3)


def test_states_are_those_before_the_response_tokens(checkpoints: Path) -> None:
    distributions = (
        ModelDistribution(model_of(checkpoints / "second")),
        ModelDistribution(model_of(checkpoints / "first"), temperature=1.3),
    )
    rollouts = rollouts_with_prompts()
    found = exact_divergences_of_models(*distributions, rollouts, batch_size=3)
    target, behaviour = (GivenLogits(plain_logits(each.model, rollouts) / each.temperature) for each in distributions)
    expected = exact_divergences(target, behaviour, token_ids=rollouts.response_token_ids)
    assert found.tokens == rollouts.num_tokens
    assert expected.kl.mean() > 0.1
    for name in ("kl", "reverse_kl", "tv", "chi2", "target_entropy", "target_log_probs", "behaviour_log_probs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=2e-3, atol=2e-4, err_msg=name)


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
    assert own.given.abs().max() > 4.5
    # At most one product is rounded to the other side; steps rounded to another dtype would give 2e-5.
    assert found.kl.mean() < (1e-12 if dtype == torch.float32 else 2e-6)


def test_what_has_no_exact_divergence_is_refused(checkpoints: Path) -> None:
    plain, training, scaled = (model_of(checkpoints / "first") for _ in range(3))
    training.train()
    head = scaled.lm_head.forward
    scaled.lm_head.forward = lambda hidden: head(hidden) * 0.5
    other_tokens = RolloutBatch.from_lists(["a"], [[1]], [[2, 24]])
    without_prompt = RolloutBatch.from_lists(["a", "b"], [[1], []], [[2], [3]])
    for model, rollouts, message in (
        (training, rollouts_with_prompts(2), "training mode"),
        (scaled, rollouts_with_prompts(2), "after the head"),
        (plain, other_tokens, "`response_token_ids` has the id 24, and the .* 24"),
        (plain, without_prompt, "rollout 1 has no prompt"),
    ):
        distribution = ModelDistribution(model)
        with pytest.raises(UnsupportedScoreError, match=message):
            exact_divergences_of_models(distribution, distribution, rollouts)
