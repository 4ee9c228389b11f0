"""Exact divergences for tests: computed in float64 from random distributions over a small vocabulary."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Values = dict[str, NDArray[Any]]
VOCABULARY = 12


def random_log_probs(tokens: int, seed: int, noise: float = 0.1) -> tuple[Float64, Float64]:
    """Return log π and log μ over the vocabulary, both [T, V]; π differs from μ by `noise` in its logits."""
    random = np.random.default_rng(seed)
    behaviour = random.normal(0.0, 2.0, (tokens, VOCABULARY))
    target = behaviour + random.normal(0.0, noise, behaviour.shape)
    return _log_softmax(target), _log_softmax(behaviour)


def exact_of(target: Float64, behaviour: Float64, chosen: NDArray[np.integer]) -> Values:
    """Return the divergences of log π and log μ [T, V] by name, with the log-probs of the tokens `chosen` [T]."""
    pi, mu, rows = np.exp(target), np.exp(behaviour), np.arange(chosen.size)
    found = {
        "kl": (mu * (behaviour - target)).sum(1),
        "reverse_kl": (pi * (target - behaviour)).sum(1),
        "tv": 0.5 * np.abs(pi - mu).sum(1),
        "target_entropy": -(pi * target).sum(1),
        "behaviour_entropy": -(mu * behaviour).sum(1),
    }
    values: Values = {name: np.maximum(value, 0.0).astype(np.float32) for name, value in found.items()}
    values["top1_flip"] = (target.argmax(1) != behaviour.argmax(1)).astype(np.uint8)
    values["target_log_probs"] = target[rows, chosen].astype(np.float32)
    return values | {"behaviour_log_probs": behaviour[rows, chosen].astype(np.float32)}


def random_exact(tokens: int, seed: int = 0, noise: float = 0.1) -> Values:
    """Return the divergences at random states, whose tokens are sampled from μ."""
    target, behaviour = random_log_probs(tokens, seed, noise)
    return exact_of(target, behaviour, sampled_from(behaviour, seed + 1))


def sampled_from(log_probs: Float64, seed: int) -> NDArray[np.int64]:
    """Return one token per row of log-probs [T, V], drawn from its distribution."""
    noise = np.random.default_rng(seed).gumbel(size=log_probs.shape)
    return np.asarray(np.argmax(log_probs + noise, axis=1))


def _log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
