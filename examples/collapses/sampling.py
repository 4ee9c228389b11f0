"""The sampler of each dose: vLLM with weights that differ from the trainer's, or the trainer's own forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from examples.collapses.grid import Dose, RunSettings, ShiftedDose
from examples.tiny_rl.policy import next_token_distributions, pad
from examples.tiny_rl.sampler import Response, Sampler
from examples.tiny_rl.task import END_OF_SEQUENCE, PAD, VOCABULARY_SIZE, Problem, encode

Weights = Mapping[str, torch.Tensor]

_RIGHT_ANSWERS = tuple(
    (problem.prompt_token_ids, [*encode(problem.worked_answer()), END_OF_SEQUENCE])
    for problem in (Problem((first, first + 1, 9 - first)) for first in range(9))
)


class ReloadError(RuntimeError):
    """The engine does not hold the weights that were loaded into it."""


class Engines:
    """The vLLM engines of this process, one for each kind of key-value cache; all runs share them.

    When an engine starts, it scores a fixed set with the start's weights. A run begins only if the engine gives the
    same scores, bit for bit, after the weights of the last run were replaced by the start's.
    """

    def __init__(self, start: Path) -> None:
        self._folder = start
        self._engines: dict[str, tuple[Sampler, NDArray[np.float64]]] = {}

    def with_start(self, kv_cache_dtype: str, start: Weights) -> Sampler:
        """Return the engine, holding the start's weights. Raises ReloadError if it does not."""
        if kv_cache_dtype not in self._engines:
            sampler = Sampler(self._folder, seed=0, kv_cache_dtype=kv_cache_dtype)
            self._engines[kv_cache_dtype] = sampler, _scores(sampler)
        sampler, expected = self._engines[kv_cache_dtype]
        sampler.load(start)
        found = _scores(sampler)
        if not np.array_equal(found, expected):
            raise ReloadError(
                f"after a reload of the start's weights the engine's scores must be those of its start, "
                f"but they differ by up to {np.abs(found - expected).max():.3g} nats"
            )
        return sampler


def _scores(sampler: Sampler) -> NDArray[np.float64]:
    prompts, responses = zip(*_RIGHT_ANSWERS, strict=True)
    return np.asarray(sampler.score(prompts, responses))


class EngineSource:
    """vLLM as the sampler of a dose."""

    def __init__(self, sampler: Sampler, settings: RunSettings, start: Weights) -> None:
        self._sampler = sampler
        self._dose = settings.dose
        self._max_tokens = settings.max_response_tokens
        self._start = start
        # The trainer's weights of the last lag + 1 steps, the oldest first.
        self._history = deque([(0, start)], maxlen=settings.dose.lag + 1)
        self.version = 0
        self.held: Weights = {}
        self._load()

    def sample(self, prompts: Sequence[Sequence[int]], responses_per_prompt: int) -> list[list[Response]]:
        """Return `responses_per_prompt` independent responses to each prompt."""
        return self._sampler.sample(prompts, responses_per_prompt, self._max_tokens)

    def sync(self, version: int, weights: Weights) -> None:
        """Take the trainer's weights after `version` updates; the engine gets them as late as the dose says."""
        self._history.append((version, weights))
        self._load()

    def _load(self) -> None:
        newest = self._history[-1][0]
        is_off = isinstance(self._dose, ShiftedDose) and not self._dose.first <= newest + 1 <= self._dose.last
        self.version, weights = self._history[-1 if is_off else 0]
        self.held = sampler_weights(self._dose, weights, self._start)
        self._sampler.load(self.held)


class ExactSource:
    """The trainer's own forward pass as the sampler, so that log μ and log π are the same numbers, bit for bit.

    With Gumbel noise fixed in advance (Gumbel-max), the response is the fixed point of "the argmax at every position,
    given the tokens before it". Decoding with a KV cache finds it but for rounding. The pass that the trainer makes,
    over the responses as the trainer pads them, must then sample every token again; where it does not, its tokens are
    the next guess, at most once for each token of the cap. Sampling by vLLM and logging the trainer's numbers as μ
    would show d = 0 too, but the tokens would still come from vLLM's distribution.
    """

    def __init__(self, model: Qwen3ForCausalLM, settings: RunSettings) -> None:
        self._model = model
        self._width = settings.width
        self._max_tokens = settings.max_response_tokens
        self.version = 0

    def sample(self, prompts: Sequence[Sequence[int]], responses_per_prompt: int) -> list[list[Response]]:
        """Return `responses_per_prompt` independent responses to each prompt."""
        rows = [list(prompt) for prompt in prompts for _ in range(responses_per_prompt)]
        noise = -torch.empty(len(rows), self._max_tokens, VOCABULARY_SIZE).exponential_().log()
        guesses = self._decode(rows, noise)
        for _ in range(self._max_tokens + 1):
            responses = [_ended(row) for row in guesses]
            final = self._distributions(rows, responses)
            guesses = (final + noise).argmax(-1).tolist()
            if all(new[: len(row)] == row for new, row in zip(guesses, responses, strict=True)):
                break
        else:
            raise RuntimeError("the trainer's pass over the sampled responses must sample them again, and does not")
        found = [
            Response(
                token_ids=row,
                log_probs=final[index, torch.arange(len(row)), row].tolist(),
                finish_reason="stop" if row[-1] == END_OF_SEQUENCE else "length",
            )
            for index, row in enumerate(responses)
        ]
        return [found[at : at + responses_per_prompt] for at in range(0, len(found), responses_per_prompt)]

    def sync(self, version: int, weights: Weights) -> None:
        """Nothing to do: the trainer's model is the sampler."""
        self.version = version

    def _decode(self, prompts: list[list[int]], noise: torch.Tensor) -> list[list[int]]:
        """Return responses sampled token by token, with a KV cache over prompts padded to the left."""
        longest = max(map(len, prompts))
        new = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens, cache = list[torch.Tensor](), None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for place in range(self._max_tokens):
                positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new.shape[1] :]
                found = self._model(
                    input_ids=new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
                )
                cache = found.past_key_values
                new = (found.logits[:, -1].float() + noise[:, place]).argmax(-1, keepdim=True)
                mask = torch.cat([mask, torch.ones_like(new)], dim=1)
                tokens.append(new)
        sampled: list[list[int]] = torch.cat(tokens, dim=1).tolist()
        return sampled

    def _distributions(self, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        """Return the log-probabilities at the positions of responses, [B, cap, vocabulary]."""
        with torch.no_grad():
            everywhere = next_token_distributions(self._model, pad(prompts, responses, self._width))
        return torch.stack(
            [
                everywhere[row, len(prompt) - 1 : len(prompt) - 1 + self._max_tokens]
                for row, prompt in enumerate(prompts)
            ]
        )


def _ended(token_ids: list[int]) -> list[int]:
    """Return the tokens up to the first end of sequence, included."""
    return token_ids[: token_ids.index(END_OF_SEQUENCE) + 1] if END_OF_SEQUENCE in token_ids else token_ids


def sampler_weights(dose: Dose, weights: Weights, start: Weights) -> Weights:
    """Return the weights that the sampler of a dose gets if the trainer has `weights`."""
    chosen = {name: start[name] if name in dose.unsynced else tensor for name, tensor in weights.items()}
    if dose.weight_bits is None:
        return chosen
    return {
        name: round_to_bits(tensor, dose.weight_bits) if tensor.ndim == 2 else tensor for name, tensor in chosen.items()
    }


def round_to_bits(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to the nearest of 2^bits − 1 evenly spaced values, symmetric about 0, with a scale for each row."""
    largest = 2 ** (bits - 1) - 1
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny) / largest
    rounded: torch.Tensor = (matrix / scale).round().clamp(-largest, largest) * scale
    return rounded
