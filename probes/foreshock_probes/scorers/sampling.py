"""The distribution of the logged log-probs: raw at temperature 1, or processed.

An engine that logs raw log-probs (vLLM's default) logs the log-softmax of the logits, whatever the sampling was. An
engine that logs processed log-probs first divides the logits by the temperature and renormalises what truncation
leaves. A replay must follow the same distribution, else it measures the difference between the two distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock_probes.scorers.request import UnsupportedScoreError

Truncation = Literal["refuse", "apply", "ignore"]


@dataclass(frozen=True, slots=True, eq=False)
class LoggedDistribution:
    """The processing of each rollout's logits before log-softmax, arrays [N].

    They are divided by `temperature`; then tokens below `min_p` of the largest probability, beyond the `top_k` largest
    (0: all) and outside the nucleus of `top_p` (1: all) get probability 0.
    """

    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """True for rollouts whose sampling was truncated, shape [N]."""
        return (self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0)

    def of(self, rows: NDArray[np.int64]) -> LoggedDistribution:
        """Return the distributions of `rows`."""
        return LoggedDistribution(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows])

    def fingerprint_fields(self) -> dict[str, Any]:
        """Return the fields of a fingerprint: the value of all rollouts; None if they differ or nothing is cut."""
        found: dict[str, Any] = {"temperature": sampled_temperature(self.temperature)}
        for name, values, plain in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0.0)):
            kinds = np.unique(values)
            found[name] = kinds[0].item() if kinds.size == 1 and kinds[0] != plain else None
        return found


def logged_distribution(
    rollouts: RolloutBatch, override: float | None = None, truncation: Truncation = "apply"
) -> LoggedDistribution:
    """Return the distribution of each rollout's logged log-probs.

    Raw log-probs have the temperature 1 and all tokens. `override` (a scorer's option `temperature`) replaces the
    temperature and every truncation. `truncation` says whether a truncation of processed log-probs is applied, refused
    or ignored. Raises UnsupportedScoreError if it is refused, or if the sampling was greedy: no replay can reproduce
    greedy log-probs.
    """
    ones, zeros = np.ones(rollouts.num_rollouts), np.zeros(rollouts.num_rollouts)
    plain = LoggedDistribution(ones * (override or 1.0), ones, zeros.astype(np.int64), zeros)
    if override is not None or rollouts.attributes.logprobs_mode != "processed_logprobs":
        return plain
    temperature = _per_rollout(rollouts, "temperature", 1.0)
    top_p, min_p = _per_rollout(rollouts, "top_p", 1.0), _per_rollout(rollouts, "min_p", 0.0)
    top_k = np.maximum(_per_rollout(rollouts, "top_k", -1), 0).astype(np.int64)
    for name, cut in (("top_p", top_p < 1.0), ("top_k", top_k > 0), ("min_p", min_p > 0.0)):
        if truncation == "refuse" and cut.any():
            raise UnsupportedScoreError(
                f"rollout {int(np.flatnonzero(cut)[0])} was sampled with {name} and processed log-probs: the logged "
                "distribution is truncated and renormalised, which trainers do not do; set the scorer's option "
                "truncation to apply or ignore, or log raw log-probs (vLLM: logprobs_mode='raw_logprobs')"
            )
    if not np.all(temperature > 0):
        raise UnsupportedScoreError(
            f"rollout {int(np.flatnonzero(~(temperature > 0))[0])} was sampled greedily (temperature 0) with processed "
            "log-probs, which no replay can reproduce; log raw log-probs (vLLM: logprobs_mode='raw_logprobs')"
        )
    if truncation != "apply":
        return LoggedDistribution(temperature, plain.top_p, plain.top_k, plain.min_p)
    return LoggedDistribution(temperature, top_p, top_k, min_p)


def divisors(rollouts: RolloutBatch, override: float | None = None) -> NDArray[np.float64]:
    """Return the divisor of each rollout's logits before log-softmax, shape [N].

    Raises UnsupportedScoreError if the logged distribution was truncated (top-p, top-k, min-p) or greedy.
    """
    return logged_distribution(rollouts, override, "refuse").temperature


def sampled_temperature(divisor: NDArray[np.float64]) -> float | None:
    """Return the temperature of a fingerprint; None if rollouts differ."""
    values = np.unique(divisor)
    return float(values[0]) if values.size == 1 else None


def _per_rollout(rollouts: RolloutBatch, name: str, default: float) -> NDArray[np.float64]:
    """Return the column `name` [N], else the batch's attribute, else `default`; NaN in the column: not known."""
    attribute: Any = getattr(rollouts.attributes, name)
    fallback = default if attribute is None else attribute
    column = getattr(rollouts, name)
    if column is None:
        return np.full(rollouts.num_rollouts, fallback, dtype=np.float64)
    values = np.asarray(column, dtype=np.float64)
    return np.where(np.isnan(values), fallback, values)
