"""The distribution that the logged log-probs belong to: raw at temperature 1, or processed.

An engine that logs raw log-probs (vLLM's default) logs log-softmax of the logits whatever the sampling was; one that
logs processed log-probs divides the logits by the temperature first and renormalises what truncation leaves. A replay
must follow the same distribution or it measures the difference of the two distributions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from probes.scorers.request import UnsupportedScoreError

__all__ = ["divisors", "sampled_temperature"]


def divisors(rollouts: RolloutBatch, override: float | None = None) -> NDArray[np.float64]:
    """Return the divisor of each rollout's logits before log-softmax, shape [N].

    It is 1 for raw log-probs and the sampling temperature for processed ones; `override` (a scorer's option
    `temperature`) replaces both. Raises UnsupportedScoreError if the logged distribution was truncated (top-p, top-k,
    min-p) or greedy: it is then not the softmax of any logits.
    """
    ones = np.ones(rollouts.num_rollouts, dtype=np.float64)
    if override is not None:
        return ones * override
    if rollouts.attributes.logprobs_mode != "processed_logprobs":
        return ones
    _refuse("top_p", _per_rollout(rollouts, "top_p", 1.0) < 1.0)
    top_k = _per_rollout(rollouts, "top_k", -1)
    _refuse("top_k", (top_k != -1) & (top_k != 0))
    _refuse("min_p", _per_rollout(rollouts, "min_p", 0.0) > 0.0)
    temperature = _per_rollout(rollouts, "temperature", 1.0)
    if not np.all(temperature > 0):
        raise UnsupportedScoreError(
            f"rollout {int(np.flatnonzero(~(temperature > 0))[0])} was sampled greedily (temperature 0) with processed "
            "log-probs, which no replay can reproduce; log raw log-probs (vLLM: logprobs_mode='raw_logprobs')"
        )
    return temperature


def sampled_temperature(divisor: NDArray[np.float64]) -> float | None:
    """The one temperature of a fingerprint, None where rollouts differ."""
    values = np.unique(divisor)
    return float(values[0]) if values.size == 1 else None


def _per_rollout(rollouts: RolloutBatch, name: str, default: float) -> NDArray[np.float64]:
    """[N] the column `name`, else the batch's attribute, else `default`; NaN in the column means: not known."""
    attribute: Any = getattr(rollouts.attributes, name)
    fallback = default if attribute is None else attribute
    column = getattr(rollouts, name)
    if column is None:
        return np.full(rollouts.num_rollouts, fallback, dtype=np.float64)
    values = np.asarray(column, dtype=np.float64)
    return np.where(np.isnan(values), fallback, values)


def _refuse(name: str, cut: NDArray[np.bool_]) -> None:
    if cut.any():
        raise UnsupportedScoreError(
            f"rollout {int(np.flatnonzero(cut)[0])} was sampled with {name} and processed log-probs: the logged "
            "distribution is truncated and renormalised, which scorers do not reproduce; log raw log-probs "
            "(vLLM: logprobs_mode='raw_logprobs')"
        )
