"""Healthy batches made with numpy: tokens sampled from a random policy, with its exact entropy.

The trainer differs by noise on the logits, so that E ρ = 1 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshock.rollouts import BatchAttributes, RolloutBatch


@dataclass(frozen=True, slots=True)
class Policy:
    """The scale of the policy's logits, its vocabulary, and the trainer's noise and factor on the logits.

    `trainer_entropy`: the logged entropies are the trainer's.
    """

    sharpness: float = 3.0
    vocabulary: int = 12
    noise: float = 0.02
    trainer_scale: float = 1.0
    trainer_entropy: bool = False


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def healthy_batch(
    seed: int, policy: Policy | None = None, *, groups: int = 8, per_group: int = 16, longest: int = 30, **columns: Any
) -> RolloutBatch:
    """Return rollouts of `groups` prompts; every token has its own distribution."""
    policy = policy or Policy()
    random = np.random.default_rng(seed)
    rollouts = groups * per_group
    offsets = np.concatenate([[0], np.cumsum(random.integers(1, longest + 1, rollouts))])
    tokens = int(offsets[-1])
    logits = random.normal(0, policy.sharpness, (tokens, policy.vocabulary))
    behaviour = log_softmax(logits)
    target = log_softmax(policy.trainer_scale * logits + random.normal(0, policy.noise, logits.shape))
    ids = (random.random((tokens, 1)) > np.cumsum(np.exp(behaviour), axis=1)).sum(1).clip(0, policy.vocabulary - 1)
    chosen = np.arange(tokens), ids
    of_entropy = target if policy.trainer_entropy else behaviour
    values: dict[str, Any] = {
        "rollout_log_probs": behaviour[chosen].astype(np.float32),
        "trainer_log_probs": target[chosen].astype(np.float32),
        "entropy": -(np.exp(of_entropy) * of_entropy).sum(1).astype(np.float32),
        "group_ids": [f"prompt-{row // per_group}" for row in range(rollouts)],
        "attributes": BatchAttributes(temperature=1.0, top_p=1.0, logprobs_mode="raw_logprobs"),
    }
    prompts = np.repeat(np.arange(groups), per_group)
    return RolloutBatch.from_arrays(
        [f"sample-{seed}-{row}" for row in range(rollouts)],
        np.stack([prompts, prompts + 7, prompts * 3], axis=1).ravel(),
        np.arange(rollouts + 1) * 3,
        ids,
        offsets,
        **(values | columns),
    )
