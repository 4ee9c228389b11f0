"""The trainer's forward pass: log-probabilities of sampled tokens.

The replay reproduces exactly this pass: sequences (prompt, then response) padded to the right with the pad id,
attention masked **by length** (a pad id that the model sampled is kept), bfloat16 autocast over float32 master
weights, log-softmax in float32. The same weights and the same batch give the same numbers, bit for bit on the same
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen3ForCausalLM

from examples.tiny_rl.task import PAD


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B sequences of at most W tokens, right-padded, each a prompt and its response."""

    token_ids: torch.Tensor  # [B, W] int64
    attention_mask: torch.Tensor  # [B, W] int64; 1 for tokens, 0 for padding
    response_mask: torch.Tensor  # [B, W - 1] bool; True if the *next* token is one of the response


def pad(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], least_width: int = 0) -> PaddedBatch:
    """Right-pad each prompt + response to the longest, or to `least_width` tokens if that is wider.

    The masks come from lengths, never from ids.
    """
    longest = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    width = max(longest, least_width)
    token_ids = torch.full((len(prompts), width), PAD, dtype=torch.int64)
    attention_mask = torch.zeros_like(token_ids)
    response_mask = torch.zeros((len(prompts), width - 1), dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        length = len(prompt) + len(response)
        token_ids[row, :length] = torch.tensor([*prompt, *response])
        attention_mask[row, :length] = 1
        response_mask[row, len(prompt) - 1 : length - 1] = True
    return PaddedBatch(token_ids, attention_mask, response_mask)


def next_token_distributions(
    model: Qwen3ForCausalLM, batch: PaddedBatch, *, autocast: bool = True, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probabilities of every next token, in nats: [B, W - 1, vocabulary] float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    return torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)


def next_token_log_probs(
    model: Qwen3ForCausalLM, batch: PaddedBatch, *, autocast: bool = True, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of each next token, in nats: two [B, W - 1] float32 tensors.

    Values are undefined at positions where `response_mask` is False.
    """
    distribution = next_token_distributions(model, batch, autocast=autocast, temperature=temperature)
    chosen = distribution.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1).detach()
    return chosen, entropy
