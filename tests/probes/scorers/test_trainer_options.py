"""Each option of `torch.trainer` gives the log-probs of a forward pass that is set up so by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.tokens import sequence
from tests.probes.scorers.test_torch_forward import score as score_with
from tests.probes.tiny import VOCABULARY, make_rollouts

Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    every = make_rollouts(24, seed=5)
    return every.select(np.flatnonzero(np.diff(every.response_offsets) > 0))


def score(folder: Path, rollouts: RolloutBatch, **options: Any) -> Array:
    return score_with(folder, rollouts, "torch.trainer", **options).log_probs


def load(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def responses(rollouts: RolloutBatch, row: int, log_probs: torch.Tensor) -> list[float]:
    """Return those of `log_probs` [time − 1] of a sequence that belong to its response."""
    prompt = int(np.diff(rollouts.prompt_offsets)[row])
    size = int(np.diff(rollouts.response_offsets)[row])
    return log_probs[prompt - 1 : prompt - 1 + size].tolist()


def by_hand(
    model: Any,
    rollouts: RolloutBatch,
    groups: list[list[int]],
    autocast: torch.dtype | None = torch.bfloat16,
    head: torch.dtype | None = None,
) -> Array:
    """Return the log-probs of batches `groups`, padded right as trainers do, from whole float32 logits."""
    found: dict[int, list[float]] = {}
    for group in groups:
        tokens = [torch.from_numpy(sequence(rollouts, row).astype(np.int64)) for row in group]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            if head is None:
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            else:
                hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        if head is not None:
            logits = hidden.to(head) @ model.lm_head.weight.detach().to(head).T
        distribution = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
        found |= {row: responses(rollouts, row, distribution[index]) for index, row in enumerate(group)}
    return np.array([value for row in sorted(found) for value in found[row]], dtype=np.float32)


def everything(rollouts: RolloutBatch) -> list[list[int]]:
    return [list(range(rollouts.num_rollouts))]


def test_default_is_a_bfloat16_autocast_over_float32_weights(checkpoints: Path, rollouts: RolloutBatch) -> None:
    folder = checkpoints / "first"
    expected = by_hand(load(folder), rollouts, everything(rollouts))
    np.testing.assert_allclose(score(folder, rollouts), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "loaded", "autocast", "head"),
    [
        ({"autocast": "float16"}, {}, torch.float16, None),
        ({"autocast": None}, {}, None, None),
        ({"autocast": None, "master_dtype": "bfloat16"}, {"dtype": torch.bfloat16}, None, None),
        ({"autocast": None, "master_dtype": "float16"}, {"dtype": torch.float16}, None, None),
        # Norms and embeddings are not autocast: with bfloat16 master weights they are computed in bfloat16.
        ({"master_dtype": "bfloat16"}, {"dtype": torch.bfloat16}, torch.bfloat16, None),
        ({"head_dtype": "float32"}, {}, torch.bfloat16, torch.float32),
        # Under autocast, eager attention rounds its scores and probabilities to bfloat16.
        ({"attention_implementation": "eager"}, {"attention": "eager"}, torch.bfloat16, None),
    ],
)
def test_each_option_of_precision_changes_the_log_probs_to_those_of_a_pass_by_hand(
    checkpoints: Path,
    rollouts: RolloutBatch,
    options: dict[str, Any],
    loaded: dict[str, Any],
    autocast: torch.dtype | None,
    head: torch.dtype | None,
) -> None:
    folder = checkpoints / "first"
    given = score(folder, rollouts, **options)
    expected = by_hand(load(folder, **loaded), rollouts, everything(rollouts), autocast, head)
    np.testing.assert_allclose(given, expected, atol=2e-6)
    without = {"autocast": None} if autocast is None and "master_dtype" in options else {}
    assert np.abs(given - score(folder, rollouts, **without)).max() > 1e-4


@pytest.mark.parametrize(
    ("options", "tokens"), [({"batch_size": 5}, None), ({"batch_tokens": 100}, 100), ({"batch_size": 1}, None)]
)
def test_micro_batch_size(
    checkpoints: Path, rollouts: RolloutBatch, options: dict[str, int], tokens: int | None
) -> None:
    # Batches may change rounding only, so the shapes that the model is given are checked too.
    folder = checkpoints / "first"
    groups: list[list[int]] = []
    longest = 0
    for row in range(rollouts.num_rollouts):
        longest = max(longest, sequence(rollouts, row).size)
        size = len(groups[-1]) if groups else 0
        if not groups or size == options.get("batch_size", 128) or (tokens and longest * (size + 1) > tokens):
            groups.append([])
            longest = sequence(rollouts, row).size
        groups[-1].append(row)
    seen: list[tuple[int, ...]] = []
    model = load(folder)
    handle = type(model).forward

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(tuple(named["input_ids"].shape))
        return handle(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", watched)
        given = score(folder, rollouts, **options)
    assert seen == [(len(group), max(sequence(rollouts, row).size for row in group)) for group in groups]
    np.testing.assert_allclose(given, by_hand(model, rollouts, groups), atol=2e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_equals_each_rollout_alone(checkpoints: Path, rollouts: RolloutBatch, attention: str) -> None:
    folder = checkpoints / "first"
    alone = by_hand(load(folder), rollouts, [[row] for row in range(rollouts.num_rollouts)], None)
    for options in ({}, {"batch_tokens": 64}, {"batching": "by_length"}):
        given = score(folder, rollouts, autocast=None, padding="none", attention_implementation=attention, **options)
        np.testing.assert_allclose(given, alone, atol=2e-5)


def test_packing_has_a_block_diagonal_mask_and_no_padding(checkpoints: Path, rollouts: RolloutBatch) -> None:
    # The same pass by hand, with an explicit additive mask in place of positions that restart.
    folder = checkpoints / "first"
    tokens = [sequence(rollouts, row).astype(np.int64) for row in range(rollouts.num_rollouts)]
    owner = torch.from_numpy(np.repeat(np.arange(len(tokens)), [row.size for row in tokens]))
    ids = torch.from_numpy(np.concatenate(tokens))[None]
    positions = torch.from_numpy(np.concatenate([np.arange(row.size) for row in tokens]))[None]
    may = (owner[:, None] == owner[None]) & torch.ones(owner.numel(), owner.numel(), dtype=torch.bool).tril()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = load(folder)(
            input_ids=ids, attention_mask=may[None, None], position_ids=positions, use_cache=False
        ).logits
    distribution = torch.log_softmax(logits[0, :-1].float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    starts = np.cumsum([0, *(row.size for row in tokens)])
    expected = [
        value
        for row, start in enumerate(starts[:-1])
        for value in responses(rollouts, row, distribution[start : start + tokens[row].size - 1])
    ]
    np.testing.assert_allclose(score(folder, rollouts, padding="none"), np.array(expected, np.float32), atol=2e-6)


@pytest.mark.parametrize("logits_bytes", [1 << 20, 40 * VOCABULARY])
def test_packed_rollouts_keep_their_own_temperatures(checkpoints: Path, logits_bytes: int) -> None:
    temperatures = np.linspace(0.5, 1.5, 9, dtype=np.float32)
    rollouts = make_rollouts(
        9, attributes=BatchAttributes(logprobs_mode="processed_logprobs"), temperature=temperatures
    )
    folder = checkpoints / "first"
    padded = score(folder, rollouts, autocast=None)
    packed = score(folder, rollouts, autocast=None, padding="none", logits_bytes=logits_bytes)
    np.testing.assert_allclose(packed, padded, atol=2e-5)


def test_empty_prompts_and_responses_can_be_packed(checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], []])
    given = score(checkpoints / "first", rollouts, autocast=None, padding="none")
    expected = score(checkpoints / "first", rollouts, autocast=None)
    assert np.isnan(given).tolist() == [True, False, False]
    np.testing.assert_allclose(given[1:], expected[1:], atol=2e-5)


def test_model_that_mixes_packed_sequences_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    configuration = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.5
    )
    MambaForCausalLM(configuration).save_pretrained(tmp_path / "mamba")
    with pytest.raises(UnsupportedScoreError, match="padding"):
        score(tmp_path / "mamba", make_rollouts(3), padding="none", attention_implementation="eager")
