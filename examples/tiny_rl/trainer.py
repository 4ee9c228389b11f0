"""RLOO: one gradient step on fresh rollouts, in bfloat16 autocast over float32 master weights.

The log-probabilities of the forward pass whose gradient is taken are log π **before** the update. A trainer logs them
as its old log-probs, and they are compared with the engine's log μ. No correction of the mismatch is applied unless a
caller passes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from examples.tiny_rl.policy import PaddedBatch, next_token_log_probs, pad

Correction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives the weight of each token from log π (detached) and the mask of response tokens, both [B, W − 1]."""


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Options of the optimizer; the advice scales `learning_rate`."""

    learning_rate: float = 1e-4
    gradient_clip: float = 1.0
    temperature: float = 1.0
    """Divides the logits of the forward pass; the sampling temperature, unless somebody forgot it."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Results of one training step over T tokens, flat in the order of the responses."""

    log_probs: NDArray[np.float32]  # [T] log π before the update
    entropy: NDArray[np.float32]  # [T] of π, in nats
    gradient_norm: float
    """Before clipping; NaN if all responses of every prompt have the same reward, so that no update was made."""
    moved: float | None = None
    """k3 of the policy after the update against the one before, nats per token; None if it was not asked for."""


def rloo_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the reward minus the mean reward of the *other* responses to the same prompt, [prompts, responses].

    Ahmadian et al. 2024, "Back to Basics", eq. 8. Each row sums to 0. At least two responses per prompt.
    """
    responses = rewards.shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (responses - 1)
    return np.asarray(rewards - others)


class Trainer:
    """The float32 master weights and their optimizer."""

    def __init__(self, model: Qwen3ForCausalLM, options: TrainerOptions) -> None:
        self.model = model
        self.options = options
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        advantages: NDArray[np.float64],
        least_width: int = 0,
        correction: Correction | None = None,
        measure_update: bool = False,
    ) -> Update:
        """Score all responses and take one step along the policy gradient of Σ_i A_i Σ_t w_it log π(y_it) / N.

        `least_width` is that of `pad`; w is 1 without a `correction`. `measure_update` scores the responses once more,
        after the update.
        """
        batch = pad(prompts, responses, least_width)
        log_probs, entropy = next_token_log_probs(self.model, batch, temperature=self.options.temperature)
        gradient_norm = math.nan
        if np.any(advantages != 0.0):
            weighted = log_probs
            if correction is not None:
                weighted = log_probs * correction(log_probs.detach(), batch.response_mask)
            per_response = torch.where(batch.response_mask, weighted, 0.0).sum(-1)
            loss = -(torch.from_numpy(advantages).float() * per_response).mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.gradient_clip)
            gradient_norm = norm.item()
            self.optimizer.step()
        before = log_probs.detach()[batch.response_mask]
        return Update(
            log_probs=before.numpy(),
            entropy=entropy[batch.response_mask].numpy(),
            gradient_norm=gradient_norm,
            moved=self._moved(batch, before) if measure_update else None,
        )

    def _moved(self, batch: PaddedBatch, before: torch.Tensor) -> float:
        with torch.no_grad():
            after, _ = next_token_log_probs(self.model, batch, temperature=self.options.temperature)
        difference = (after[batch.response_mask] - before).double()
        return float((torch.expm1(difference) - difference).mean())
