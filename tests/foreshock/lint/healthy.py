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

    `trainer_entropy`: the logged entropies are the trainer's, else those of the policy before temperature and
    truncation. `processed`: log μ is that of the sampling distribution, after temperature and truncation.
    """

    sharpness: float = 3.0
    vocabulary: int = 12
    noise: float = 0.02
    trainer_scale: float = 1.0
    trainer_entropy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    processed: bool = False


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def nucleus(log_probs: np.ndarray, top_p: float) -> np.ndarray:
    """Return the log-probs of the smallest set that reaches `top_p`, renormalised; −inf outside."""
    if top_p >= 1:
        return log_probs
    order = np.argsort(-log_probs, axis=-1)
    ranked = np.take_along_axis(np.exp(log_probs), order, axis=-1)
    kept = np.zeros(log_probs.shape, np.bool_)
    np.put_along_axis(kept, order, ranked.cumsum(-1) - ranked < top_p, axis=-1)
    return log_softmax(np.where(kept, log_probs, -np.inf))


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
    sampled = nucleus(log_softmax(logits / policy.temperature), policy.top_p)
    ids = (random.random((tokens, 1)) > np.cumsum(np.exp(sampled), axis=1)).sum(1).clip(0, policy.vocabulary - 1)
    chosen = np.arange(tokens), ids
    of_entropy = target if policy.trainer_entropy else behaviour
    values: dict[str, Any] = {
        "rollout_log_probs": (sampled if policy.processed else behaviour)[chosen].astype(np.float32),
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


def sampled_batch(**how: Any) -> RolloutBatch:
    """Return 512 rollouts of 16 prompts, sampled with a temperature and truncation; nothing is declared."""
    policy = Policy(sharpness=4.0, vocabulary=16, noise=1e-3, **how)
    return healthy_batch(0, policy, groups=16, per_group=32, longest=20, attributes=BatchAttributes())
