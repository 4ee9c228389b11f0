"""The frozen scorer: `torch.float32` on responses to the same prompts, at every k-th step of every run.

The training rollouts of each step are to other problems and are scored by the trainer. Here the problems never change,
and neither does the scorer: the trainer's weights of the step in float32, eager attention, one batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from examples.collapses.grid import RunSettings
from examples.collapses.sampling import EngineSource, ExactSource
from examples.tiny_rl.policy import next_token_log_probs, pad
from examples.tiny_rl.rollouts import StepRollouts, sample_step
from examples.tiny_rl.task import draw_problem

FIXED_PROBLEMS: Final = 48
SEED_OF_PROBLEMS: Final = 20_000

LARGEST_ENGINE_ERROR: Final = 0.5
"""Mean |log-prob of the engine − that of the weights it was given, in float32|, nats. Measured: 0.001 to 0.05."""


class FixedSet:
    """The fixed problems, and the scorer's models."""

    def __init__(self, settings: RunSettings, start: Qwen3ForCausalLM, spare: Qwen3ForCausalLM) -> None:
        source = random.Random(SEED_OF_PROBLEMS)
        digits = settings.fewest_digits, settings.most_digits
        self._problems = [draw_problem(source, *digits) for _ in range(FIXED_PROBLEMS)]
        self._start, self._spare = start, spare

    def evaluate(self, source: EngineSource | ExactSource, model: Qwen3ForCausalLM, seed: int) -> Mapping[str, float]:
        """Return the values of `fixed:…` for the trainer's weights and the sampler as they are now.

        Raises RuntimeError if the engine does not agree with the weights that it was given.
        """
        torch.manual_seed(seed)
        rollouts = sample_step(0, source, self._problems, 1)
        behaviour = np.concatenate([response.log_probs for response in rollouts.responses])
        log_probs, entropy = _score(model, rollouts)
        difference = log_probs - behaviour
        values = {
            "fixed:reward_mean": float(rollouts.rewards.mean()),
            "fixed:response_length_mean": rollouts.mean_response_length,
            "fixed:entropy_mean": float(entropy.mean()),
            "fixed:float32_k3_kl": float(np.mean(np.expm1(difference) - difference)),
            "fixed:float32_mean_abs_d": float(np.mean(np.abs(difference))),
            "fixed:float32_max_abs_d": float(np.abs(difference).max()),
            "fixed:k1_from_start": float(np.mean(log_probs - _score(self._start, rollouts)[0])),
        }
        if isinstance(source, EngineSource):
            self._spare.load_state_dict(source.held)
            error = float(np.mean(np.abs(_score(self._spare, rollouts)[0] - behaviour)))
            values["fixed:engine_error"] = error
            if not error <= LARGEST_ENGINE_ERROR:
                raise RuntimeError(
                    f"engine and its weights differ by {error:.3g} nats a token, at most {LARGEST_ENGINE_ERROR} is "
                    "numerics: the engine holds other weights"
                )
        return values


def _score(model: Qwen3ForCausalLM, rollouts: StepRollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs and entropy of the responses' tokens in float32, [T] float64 each."""
    batch = pad(rollouts.prompts, rollouts.token_ids)
    with torch.no_grad():
        log_probs, entropy = next_token_log_probs(model, batch, autocast=False)
    mask = batch.response_mask
    return log_probs[mask].double().numpy(), entropy[mask].double().numpy()
