"""Torch's scorers equal an independent forward pass; memory bound, precision and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.digests import weights_digest
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.offers import load_scorer
from foreshock_probes.scorers.request import Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.tiny import VOCABULARY, make_rollouts, one_by_one


def score(
    folder: Path, rollouts: RolloutBatch, scorer: str = "torch.float32", variant: str = "", **options: Any
) -> Scored:
    request = ScoreRequest(scorer, variant, rollouts, folder, weights_digest(folder), 7, options)
    return load_scorer(scorer)(request, WarmModel(), lambda tokens: None)


@pytest.mark.parametrize("options", [{}, {"padding": "left"}, {"batch_size": 3}, {"attention_implementation": "eager"}])
def test_padding_and_batching_do_not_change_log_probs(checkpoints: Path, options: dict[str, Any]) -> None:
    rollouts = make_rollouts(17)
    given = score(checkpoints / "first", rollouts, **options).log_probs
    np.testing.assert_allclose(given, one_by_one(checkpoints / "first", rollouts), atol=2e-5)


def test_rebatched_variant_equals_up_to_rounding(checkpoints: Path) -> None:
    rollouts = make_rollouts(17)
    plain = score(checkpoints / "first", rollouts)
    again = score(checkpoints / "first", rollouts, variant="rebatched")
    np.testing.assert_allclose(again.log_probs, plain.log_probs, atol=2e-5)
    assert again.fingerprint.batch_composition != plain.fingerprint.batch_composition


@pytest.mark.parametrize("scorer", ["torch.trainer", "torch.bfloat16", "torch.float32"])
@pytest.mark.parametrize("variant", ["", "rebatched"])
def test_logits_in_pieces_give_the_same_bits(checkpoints: Path, scorer: str, variant: str) -> None:
    rollouts = make_rollouts(17)
    whole = score(checkpoints / "first", rollouts, scorer, variant).log_probs
    pieces = score(checkpoints / "first", rollouts, scorer, variant, logits_bytes=10 * VOCABULARY * 7).log_probs
    np.testing.assert_allclose(pieces, whole, atol=1e-6)
    assert np.isfinite(pieces).all()


def test_precisions_differ_and_are_in_the_fingerprint(checkpoints: Path) -> None:
    rollouts = make_rollouts(17)
    exact = score(checkpoints / "first", rollouts, "torch.float32", batching="in_order")
    autocast = score(checkpoints / "first", rollouts, "torch.trainer")
    head = score(checkpoints / "first", rollouts, "torch.trainer", head_dtype="float32")
    coarse = score(checkpoints / "first", rollouts, "torch.bfloat16")
    for other in (autocast, head, coarse):
        assert 1e-4 < np.abs(other.log_probs - exact.log_probs).max() < 1.0
    assert np.abs(head.log_probs - autocast.log_probs).max() > 1e-4
    same = score(checkpoints / "first", rollouts, "torch.trainer", autocast=None)
    assert same.log_probs.tolist() == exact.log_probs.tolist()
    described = [
        (s.fingerprint.master_dtype, s.fingerprint.autocast, s.fingerprint.head_dtype) for s in (autocast, head)
    ]
    assert described == [("float32", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32")]
    assert (coarse.fingerprint.dtype, coarse.fingerprint.autocast) == ("bfloat16", None)


def test_temperature_divides_the_logits(checkpoints: Path) -> None:
    attributes = BatchAttributes(temperature=0.5, logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(17, attributes=attributes)
    given = score(checkpoints / "first", rollouts)
    np.testing.assert_allclose(given.log_probs, one_by_one(checkpoints / "first", rollouts, 0.5), atol=5e-5)
    assert (given.fingerprint.temperature, given.fingerprint.logprobs_mode) == (0.5, "processed_logprobs")


def test_rollouts_without_any_response_give_no_scores(checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a"], [[3]], [[]])
    assert score(checkpoints / "first", rollouts).log_probs.size == 0


def test_fingerprint_has_engine_device_and_versions(checkpoints: Path) -> None:
    made_by = score(checkpoints / "first", make_rollouts(3)).fingerprint
    assert (made_by.engine, made_by.engine_version, made_by.attention_backend) == ("torch", torch.__version__, "sdpa")
    assert (made_by.weights_digest, made_by.weights_version) == (weights_digest(checkpoints / "first"), 7)
    assert "transformers" in made_by.library_versions


def test_rollouts_of_another_vocabulary_raise(checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a"], [[1]], [[VOCABULARY]])
    with pytest.raises(UnsupportedScoreError, match="did not sample these rollouts"):
        score(checkpoints / "first", rollouts)


@pytest.mark.parametrize(
    ("scorer", "options", "words"),
    [
        ("torch.trainer", {"autocst": None}, "autocst"),
        ("torch.trainer", {"autocast": "float8"}, "autocast"),
        ("torch.float32", {"master_dtype": "bfloat16"}, "master_dtype"),
        ("torch.trainer", {"batch_size": 0}, "batch_size"),
        ("torch.trainer", {"attention_implementation": "no_such_thing"}, "no_such_thing"),
    ],
)
def test_invalid_options_raise(checkpoints: Path, scorer: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedScoreError, match=words):
        score(checkpoints / "first", make_rollouts(2), scorer, **options)


def test_checkpoint_with_missing_parameters_raises(checkpoints: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "incomplete"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoints / "first" / "config.json").read_bytes())
    parameters = load_file(checkpoints / "first" / "model.safetensors")
    del parameters["lm_head.weight"]
    save_file(parameters, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedScoreError, match=r"lm_head\.weight"):
        score(folder, make_rollouts(2))


def test_soft_capped_model_is_scored_whole_and_in_pieces(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    configuration = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=1.0, initializer_range=0.3,
    )  # fmt: skip
    Gemma2ForCausalLM(configuration).save_pretrained(tmp_path / "gemma")
    rollouts = make_rollouts(5)
    expected = one_by_one(tmp_path / "gemma", rollouts)
    for logits_bytes in (1 << 20, 1):
        given = score(tmp_path / "gemma", rollouts, attention_implementation="eager", logits_bytes=logits_bytes)
        np.testing.assert_allclose(given.log_probs, expected, atol=2e-3)


def test_model_that_scales_its_logits_is_not_scored_in_pieces(tmp_path: Path) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    configuration = CohereConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, logit_scale=0.5, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    CohereForCausalLM(configuration).save_pretrained(tmp_path / "cohere")
    rollouts = make_rollouts(5)
    given = score(tmp_path / "cohere", rollouts).log_probs
    np.testing.assert_allclose(given, one_by_one(tmp_path / "cohere", rollouts), atol=2e-5)
    with pytest.raises(UnsupportedScoreError, match="logits_bytes"):
        score(tmp_path / "cohere", rollouts, logits_bytes=1)


def test_model_stays_loaded_until_weights_change(checkpoints: Path) -> None:
    warm, rollouts = WarmModel(), make_rollouts(5)
    function = load_scorer("torch.float32")
    given = []
    for name in ("first", "first", "second", "first"):
        folder = checkpoints / name
        request = ScoreRequest("torch.float32", "", rollouts, folder, weights_digest(folder))
        given.append(function(request, warm, lambda tokens: None).log_probs.tobytes())
    assert given[0] == given[1] == given[3] != given[2]
    loaded = warm.get("other", lambda: "loaded anew")
    assert loaded == "loaded anew"
