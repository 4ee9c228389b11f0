"""Exact divergences for tests: computed in float64 from random distributions over a small vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import ExactBatch
from foreshock.rollouts.arrays import offsets_of_lengths

Float64 = NDArray[np.float64]
VOCABULARY = 12


def random_log_probs(tokens: int, seed: int, noise: float = 0.1) -> tuple[Float64, Float64]:
    """Return log π and log μ over the vocabulary, both [T, V]; π differs from μ by `noise` in its logits."""
    random = np.random.default_rng(seed)
    behaviour = random.normal(0.0, 2.0, (tokens, VOCABULARY))
    target = behaviour + random.normal(0.0, noise, behaviour.shape)
    return _log_softmax(target), _log_softmax(behaviour)


def exact_of(
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    target: Float64,
    behaviour: Float64,
    chosen: NDArray[np.integer],
    **fingerprint: object,
) -> ExactBatch:
    """Return the divergences of log π and log μ [T, V], with the log-probs of the tokens `chosen` [T]."""
    pi, mu, rows = np.exp(target), np.exp(behaviour), np.arange(chosen.size)
    values = {
        "kl": (mu * (behaviour - target)).sum(1),
        "reverse_kl": (pi * (target - behaviour)).sum(1),
        "tv": 0.5 * np.abs(pi - mu).sum(1),
        "target_entropy": -(pi * target).sum(1),
        "behaviour_entropy": -(mu * behaviour).sum(1),
        "target_log_probs": target[rows, chosen],
        "behaviour_log_probs": behaviour[rows, chosen],
    }
    return ExactBatch(
        sample_ids=list(sample_ids),
        offsets=offsets_of_lengths(np.asarray(lengths, dtype=np.int64)),
        top1_flip=(target.argmax(1) != behaviour.argmax(1)).astype(np.uint8),
        target_fingerprint=Fingerprint(engine="torch", **fingerprint),  # type: ignore[arg-type]
        behaviour_fingerprint=Fingerprint(engine="vllm", **fingerprint),  # type: ignore[arg-type]
        **{name: np.maximum(value, 0.0).astype(np.float32) if "log_probs" not in name else value.astype(np.float32)
           for name, value in values.items()},
    )  # fmt: skip


def random_exact(lengths: Sequence[int], seed: int = 0, noise: float = 0.1) -> ExactBatch:
    """Return the divergences at states of random rollouts, whose tokens are sampled from μ."""
    tokens = sum(lengths)
    target, behaviour = random_log_probs(tokens, seed, noise)
    chosen = sampled_from(behaviour, seed + 1)
    return exact_of([f"sample-{row}" for row in range(len(lengths))], lengths, target, behaviour, chosen)


def sampled_from(log_probs: Float64, seed: int) -> NDArray[np.int64]:
    """Return one token per row of log-probs [T, V], drawn from its distribution."""
    noise = np.random.default_rng(seed).gumbel(size=log_probs.shape)
    return np.asarray(np.argmax(log_probs + noise, axis=1))


def _log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
