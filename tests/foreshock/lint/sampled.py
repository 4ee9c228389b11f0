"""Rollouts sampled from the recorded run's model with temperature and truncation, logged raw or processed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from examples.tiny_rl.model import load_model
from examples.tiny_rl.task import draw_problem
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.paths import RECORDED

_PROMPTS, _RESPONSES = 16, 32
_PROMPT_TOKENS, _TOKENS = 12, 10


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, the kind of log-probs that the engine logs, and the trainer's temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    processed: bool = False
    trainer_temperature: float = 1.0


@cache
def sample(how: Sampling) -> RolloutBatch:
    """Return rollouts with responses of ten tokens; an end of sequence does not end a response. Nothing is declared.

    The entropy is that of the distribution before temperature and truncation, as trainers log it.
    """
    problems = random.Random(0)
    drawn = (draw_problem(problems).prompt_token_ids for _ in range(1000))
    prompts = [prompt for prompt in drawn if len(prompt) == _PROMPT_TOKENS][:_PROMPTS]
    threads = torch.get_num_threads()
    # Threads do not make so small a model faster, and take time from other tests.
    torch.set_num_threads(1)
    ids, raw, processed, entropy, target = _continue([prompt for prompt in prompts for _ in range(_RESPONSES)], how)
    torch.set_num_threads(threads)
    rollouts = len(prompts) * _RESPONSES
    noise = np.random.default_rng(0).normal(1.0, 1e-3, target.size).astype(np.float32)
    return RolloutBatch.from_arrays(
        [f"sample-{row}" for row in range(rollouts)],
        np.repeat(prompts, _RESPONSES, axis=0).ravel(),
        np.arange(rollouts + 1) * _PROMPT_TOKENS,
        ids.ravel(),
        np.arange(rollouts + 1) * _TOKENS,
        rollout_log_probs=(processed if how.processed else raw).ravel(),
        trainer_log_probs=target.ravel() * noise,
        entropy=entropy.ravel(),
        group_ids=[f"prompt-{row // _RESPONSES}" for row in range(rollouts)],
        attributes=BatchAttributes(),
    )


@torch.no_grad()
def _continue(prompts: list[list[int]], how: Sampling) -> tuple[np.ndarray, ...]:
    """Return ids, raw and processed log μ, entropy and log π of a response to each prompt, each [rollouts, tokens]."""
    model = load_model(RECORDED / "checkpoints" / "step_0001").eval()
    generator = torch.Generator().manual_seed(0)
    tokens, past = torch.tensor(prompts), None
    columns: list[list[torch.Tensor]] = [[], [], [], [], []]
    for _ in range(_TOKENS):
        output = model(input_ids=tokens, past_key_values=past, use_cache=True)
        past, logits = output.past_key_values, output.logits[:, -1].float()
        raw, shaped = torch.log_softmax(logits, -1), _shaped(logits, how)
        tokens = torch.multinomial(shaped.exp(), 1, generator=generator)
        entropy = -(raw.exp() * raw).sum(-1, keepdim=True)
        target = torch.log_softmax(logits / how.trainer_temperature, -1).gather(1, tokens)
        for column, values in zip(
            columns, (tokens, raw.gather(1, tokens), shaped.gather(1, tokens), entropy, target), strict=True
        ):
            column.append(values)
    return tuple(torch.cat(column, 1).numpy() for column in columns)


def _shaped(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Return the log-probs of the sampling distribution: temperature first, then the nucleus, as in engines."""
    shaped = torch.log_softmax(logits / how.temperature, -1)
    if how.top_p >= 1:
        return shaped
    ordered, order = shaped.sort(-1, descending=True)
    outside = ordered.exp().cumsum(-1) - ordered.exp() >= how.top_p
    cut = torch.zeros_like(outside).scatter(-1, order, outside)
    return torch.log_softmax(shaped.masked_fill(cut, -torch.inf), -1)
