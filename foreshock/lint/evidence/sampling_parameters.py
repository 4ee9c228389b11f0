"""Count rollouts by their declared sampling: temperature, truncation, and the kind of log-probs that were logged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["count_sampling_parameters"]


def count_sampling_parameters(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count rollouts by the sampling columns, else the batch attributes, else the engine's fingerprint."""
    values = {name: _declared(batch, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    temperature, top_p, top_k, min_p = (values[name] for name in ("temperature", "top_p", "top_k", "min_p"))
    # NaN (not declared) compares False: such a rollout counts as neither tempered nor truncated.
    with np.errstate(invalid="ignore"):
        tempered = (temperature != 1.0) & ~np.isnan(temperature)
        truncated = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
        greedy = temperature == 0.0
    shaped = tempered | truncated
    unknown = np.isnan(temperature) & np.isnan(top_p) & np.isnan(top_k) & np.isnan(min_p)
    mode = _logprobs_mode(batch)
    raw = mode == "raw_logprobs"
    rollouts = batch.num_rollouts
    builder.count(
        declared_tempered=int(tempered.sum()),
        declared_truncated=int(truncated.sum()),
        declared_shaped=int(shaped.sum()),
        sampling_unknown=int(unknown.sum()),
        mode_raw=rollouts if raw else 0,
        mode_processed=rollouts if mode == "processed_logprobs" else 0,
        mode_unknown=rollouts if mode is None else 0,
        raw_and_shaped=int(shaped.sum()) if raw else 0,
        processed_and_truncated=int(truncated.sum()) if mode == "processed_logprobs" else 0,
        shaped_mode_unknown=int(shaped.sum()) if mode is None else 0,
        unknown_repeat_chance=int((greedy if mode == "processed_logprobs" else shaped).sum()),
        declared_bypass=rollouts if batch.attributes.trainer_policy == "bypass" else 0,
        declared_policy=rollouts if batch.attributes.trainer_policy is not None else 0,
    )
    if shaped.any():
        builder.raise_extremes(
            {
                "max_temperature": _largest(temperature),
                "minus_min_temperature": _largest(-temperature),
                "minus_min_top_p": _largest(-top_p),
                "minus_min_top_k": _largest(-top_k[top_k > 0]),
                "max_min_p": _largest(min_p),
            }
        )


def _logprobs_mode(batch: RolloutBatch) -> str | None:
    fingerprint = batch.attributes.engine_fingerprint
    return batch.attributes.logprobs_mode or (None if fingerprint is None else fingerprint.logprobs_mode)


def _declared(batch: RolloutBatch, name: str) -> NDArray[np.float64]:
    """Return a sampling parameter by rollout, shape [N]: its own, else the batch's, else the engine's, else NaN."""
    column = getattr(batch, name)
    value = getattr(batch.attributes, name)
    if value is None and batch.attributes.engine_fingerprint is not None:
        value = getattr(batch.attributes.engine_fingerprint, name)
    default = np.full(batch.num_rollouts, np.nan if value is None else float(value))
    return default if column is None else np.where(np.isnan(column), default, column)


def _largest(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max(initial=-np.inf))
