"""vLLM's scorers: their log-probs are those of the model, and what they refuse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.engines.process import EngineError
from tests.probes.replaying import Asked, Score, scored
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import VOCABULARY, make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

PLAIN = make_rollouts(9)
PROCESSED = BatchAttributes(logprobs_mode="processed_logprobs")
HOT = make_rollouts(9, attributes=PROCESSED, temperature=[0.5] * 5 + [2.0] * 4)
EMPTY = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], [8]])
# A bound of 20 tokens, so that prompts come in chunks.
CHUNKED: dict[str, Any] = {"logits_bytes": 10 * VOCABULARY * 20}
Key = tuple[str, str, str]
ASKED: dict[Key, Any] = {
    **{
        (scorer, name, variant): (batch, "first", scorer, variant, {})
        for scorer in ("vllm.prefill", "vllm.decode")
        for name, batch, variant in (
            ("plain", PLAIN, ""), ("plain", PLAIN, "rebatched"), ("hot", HOT, ""), ("hot", HOT, "rebatched"),
            ("empty", EMPTY, ""),
        )
    },
}  # fmt: skip
# Each needs a start of vLLM of its own.
IN_ENGINES_OF_THEIR_OWN: dict[Key, Any] = {
    ("vllm.prefill", "chunked", ""): (PLAIN, "first", "vllm.prefill", "", CHUNKED),
    ("vllm.prefill", "second", ""): (PLAIN, "second", "vllm.prefill", "", {}),
}
Found = dict[Key, Score]


def scores_of(asked: Mapping[Key, Any], checkpoints: Path, folder: Path) -> Found:
    """Score in float32."""
    wanted = [
        Asked(batch, checkpoints / weights, scorer, variant, {"dtype": "float32", **options})
        for batch, weights, scorer, variant, options in asked.values()
    ]
    return dict(zip(asked, scored(folder, *wanted), strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Found:
    return scores_of(ASKED, checkpoints, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def found_apart(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Found:
    return scores_of(IN_ENGINES_OF_THEIR_OWN, checkpoints, tmp_path_factory.mktemp("vllm"))


def check_against_torch(found: Found, asked: Mapping[Key, Any], checkpoints: Path) -> None:
    for key, (log_probs, _) in found.items():
        batch, weights, *_ = asked[key]
        by_torch = score(checkpoints / weights, batch, "torch.float32").log_probs
        np.testing.assert_allclose(log_probs, by_torch, atol=1e-4, err_msg=str(key))


def test_log_probs_are_those_of_the_model_in_any_batches_and_at_any_temperature(
    found: Found, checkpoints: Path
) -> None:
    check_against_torch(found, ASKED, checkpoints)
    for scorer in ("vllm.prefill", "vllm.decode"):
        assert np.isnan(found[scorer, "empty", ""][0]).tolist() == [True, False, False, True]


def test_log_probs_are_those_of_the_model_in_chunks_and_with_other_weights(
    found_apart: Found, checkpoints: Path
) -> None:
    check_against_torch(found_apart, IN_ENGINES_OF_THEIR_OWN, checkpoints)


def test_fingerprint_names_the_numerics(found: Found, found_apart: Found) -> None:
    plain, rebatched = (found["vllm.prefill", "plain", variant][1] for variant in ("", "rebatched"))
    assert (plain.engine, plain.dtype) == ("vllm", "float32")
    assert plain.batch_composition != rebatched.batch_composition
    assert found_apart["vllm.prefill", "chunked", ""][1].flags["max_num_batched_tokens"] == "20"
    assert found_apart["vllm.prefill", "second", ""][1].weights_digest != plain.weights_digest


def test_what_vllm_refuses_fails_for_good_in_its_words(checkpoints: Path, tmp_path: Path) -> None:
    too_long = RolloutBatch.from_lists(["a"], [[1] * 100], [[2] * 40])
    with pytest.raises(EngineError, match=r"max_model_len|max_position_embeddings|model length") as caught:
        scored(tmp_path, Asked(too_long, checkpoints / "second", "vllm.prefill"))
    assert caught.value.kind == "final"
