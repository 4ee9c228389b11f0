"""`torch.decode` equals a whole forward pass of the same dtype within rounding, in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.scorers.request import UnsupportedScoreError
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import make_rollouts


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 1}, {"attention_implementation": "eager"}])
@pytest.mark.parametrize("variant", ["", "rebatched"])
def test_decoding_equals_a_whole_pass_in_float32(checkpoints: Path, options: dict[str, Any], variant: str) -> None:
    rollouts = make_rollouts(17)
    whole = score(checkpoints / "first", rollouts, "torch.float32").log_probs
    decoded = score(checkpoints / "first", rollouts, "torch.decode", variant, dtype="float32", **options)
    np.testing.assert_allclose(decoded.log_probs, whole, atol=2e-5)


def test_decoding_in_bfloat16_differs_from_float32_no_more_than_a_whole_pass_does(checkpoints: Path) -> None:
    rollouts = make_rollouts(40)
    exact = score(checkpoints / "first", rollouts, "torch.float32").log_probs
    whole, decoded = (
        score(checkpoints / "first", rollouts, name).log_probs - exact for name in ("torch.bfloat16", "torch.decode")
    )
    assert 0 < np.sqrt(np.mean(decoded**2)) < 1.5 * np.sqrt(np.mean(whole**2))


def test_fingerprint_says_how_tokens_were_computed(checkpoints: Path) -> None:
    made_by = score(checkpoints / "first", make_rollouts(3), "torch.decode", head_dtype="float32").fingerprint
    assert (made_by.dtype, made_by.head_dtype, made_by.autocast) == ("bfloat16", "float32", None)
    assert made_by.flags["pass"] == "one token at a time over a KV cache"


def test_temperature_and_truncation_are_those_of_the_run(checkpoints: Path) -> None:
    attributes = BatchAttributes(logprobs_mode="processed_logprobs", top_p=0.9, top_k=5, min_p=0.02)
    rollouts = make_rollouts(9, attributes=attributes, temperature=[0.5] * 5 + [2.0] * 4)
    decoded = score(checkpoints / "first", rollouts, "torch.decode", dtype="float32")
    whole = score(checkpoints / "first", rollouts, "torch.float32", truncation="apply")
    np.testing.assert_allclose(decoded.log_probs, whole.log_probs, atol=1e-4)
    assert np.isneginf(decoded.log_probs).any()  # random tokens, which such a sampler would not have chosen
    assert np.isfinite(decoded.log_probs).any()
    assert (decoded.fingerprint.top_p, decoded.fingerprint.top_k, decoded.fingerprint.temperature) == (0.9, 5, None)
    with pytest.raises(UnsupportedScoreError, match="truncation"):
        score(checkpoints / "first", rollouts, "torch.float32")


def test_empty_prompts_and_responses_are_scored(checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], [8]])
    decoded = score(checkpoints / "first", rollouts, "torch.decode", dtype="float32").log_probs
    whole = score(checkpoints / "first", rollouts, "torch.float32").log_probs
    assert np.isnan(decoded).tolist() == [True, False, False, True]
    np.testing.assert_allclose(decoded, whole, atol=2e-5)
