"""Rollouts of tiny real models, sampled by torch, and the log-probs of trainers with known faults.

`sample_rollouts` samples from the model's own distribution at a temperature. The trainers score the same tokens with a
forward pass of their own; `dropped_id` is the fault of an attention mask made from `id != pad`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from examples.tiny_rl.model import load_model, save_model
from examples.tiny_rl.task import END_OF_SEQUENCE, MAX_RESPONSE_TOKENS, PAD, draw_problem
from foreshock.rollouts import BatchAttributes, RolloutBatch


def addition_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of the task of examples/tiny_rl."""
    source = random.Random(seed)
    return [draw_problem(source).prompt_token_ids for _ in range(count)]


def save_llama(folder: Path, seed: int) -> Path:
    """Save a Llama of 30 thousand parameters with random weights so large that its distributions are not uniform."""
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


def save_with_sampled_pad(weights: Path, folder: Path, factor: float) -> Path:
    """Save the weights; in the head, the pad id's row becomes `factor` times the mean of the digits' rows."""
    model = load_model(weights)
    with torch.no_grad():
        head = model.lm_head.weight
        head[PAD] = factor * head[2:12].mean(0)
    save_model(model, folder)
    return folder


@torch.no_grad()
def sample_rollouts(
    weights: Path,
    prompts: Sequence[Sequence[int]],
    per_prompt: int = 16,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    longest: int = MAX_RESPONSE_TOKENS,
    end: int | None = END_OF_SEQUENCE,
) -> RolloutBatch:
    """Return `per_prompt` rollouts of each prompt, with log μ at temperature 1 in float32 and entropies of μ.

    A response ends with the id `end`, or after `longest` tokens.
    """
    torch.set_num_threads(1)  # more threads do not speed up so small a model
    model, generator = _load(weights), torch.Generator().manual_seed(seed)
    responses, log_mu, entropies, names, groups, repeated = [], [], [], [], [], []
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([list(prompt)] * per_prompt)
        past, columns = None, []
        ended = torch.zeros(per_prompt, dtype=torch.bool)
        for _ in range(longest):
            output = model(input_ids=tokens, past_key_values=past, use_cache=True)
            past = output.past_key_values
            raw = torch.log_softmax(output.logits[:, -1].float(), -1)
            tokens = torch.multinomial(torch.softmax(raw / temperature, -1), 1, generator=generator)
            columns.append(torch.cat([tokens.double(), raw.gather(1, tokens).double(), _entropy(raw).double()], 1))
            ended |= tokens[:, 0] == end
            if ended.all():
                break
        drawn = torch.stack(columns, 1).numpy()
        for row in range(per_prompt):
            ids = drawn[row, :, 0].astype(np.int64)
            ends = np.flatnonzero(ids == end) if end is not None else np.zeros(0, np.int64)
            length = int(ends[0]) + 1 if ends.size else ids.size
            responses.append(ids[:length].tolist())
            log_mu.append(drawn[row, :length, 1].tolist())
            entropies.append(drawn[row, :length, 2].tolist())
            names.append(f"prompt-{number}-{row}")
            groups.append(f"prompt-{number}")
            repeated.append(list(prompt))
    return RolloutBatch.from_lists(
        names,
        repeated,
        responses,
        rollout_log_probs=log_mu,
        entropy=entropies,
        group_ids=groups,
        attributes=BatchAttributes(temperature=1.0, top_p=1.0, logprobs_mode="raw_logprobs"),
    )


@torch.no_grad()
def log_probs(
    weights: Path, batch: RolloutBatch, *, dropped_id: int | None = None, autocast: bool = True
) -> NDArray[np.float32]:
    """Return log π of the response tokens, shape [T]: float32 weights, under bfloat16 autocast if `autocast`.

    `dropped_id`: the attention mask is 0 at this id and positions count the other tokens, as in trainers that make both
    from `id != pad`.
    """
    model, found = _load(weights), np.empty(batch.num_tokens, np.float32)
    for row in range(batch.num_rollouts):
        prompt = batch.prompt_token_ids[batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]]
        start, end = batch.response_offsets[row : row + 2]
        ids = torch.from_numpy(np.concatenate([prompt, batch.response_token_ids[start:end]]).astype(np.int64))[None]
        kept = torch.ones_like(ids) if dropped_id is None else (ids != dropped_id).long()
        places = (kept.cumsum(-1) - 1).clamp(min=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids, attention_mask=kept, position_ids=places, use_cache=False).logits
        scored = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])
        found[start:end] = scored[0, prompt.size - 1 :, 0].numpy()
    return found


def _load(weights: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    return model.eval()


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    return -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
