"""What a batch says of its own sampling: which rollouts were tempered or truncated, and which log-probs were logged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.tally import Tally
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["count_declared"]


def count_declared(batch: RolloutBatch, tally: Tally) -> None:
    """Count rollouts by what the attributes (else the engine's fingerprint) and the sampling columns declare."""
    values = {name: _declared(batch, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    temperature, top_p, top_k, min_p = (values[name] for name in ("temperature", "top_p", "top_k", "min_p"))
    # NaN compares False: what is not declared is neither.
    with np.errstate(invalid="ignore"):
        tempered = (temperature != 1.0) & ~np.isnan(temperature)
        truncated = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
        greedy = temperature == 0.0
    shaped = tempered | truncated
    unknown = np.isnan(temperature) & np.isnan(top_p) & np.isnan(top_k) & np.isnan(min_p)
    mode = _mode(batch)
    raw = mode == "raw_logprobs"
    rollouts = batch.num_rollouts
    tally.count(
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
        uncomparable_sampling=int((greedy if mode == "processed_logprobs" else shaped).sum()),
        declared_bypass=rollouts if batch.attributes.trainer_policy == "bypass" else 0,
        declared_policy=rollouts if batch.attributes.trainer_policy is not None else 0,
    )
    if shaped.any():
        tally.largest(
            {
                "max_temperature": _largest(temperature),
                "minus_min_temperature": _largest(-temperature),
                "minus_min_top_p": _largest(-top_p),
                "minus_min_top_k": _largest(-top_k[top_k > 0]),
                "max_min_p": _largest(min_p),
            }
        )


def _mode(batch: RolloutBatch) -> str | None:
    fingerprint = batch.attributes.engine_fingerprint
    return batch.attributes.logprobs_mode or (None if fingerprint is None else fingerprint.logprobs_mode)


def _declared(batch: RolloutBatch, name: str) -> NDArray[np.float64]:
    """[N] a sampling parameter of each rollout: its own, else the batch's, else the engine's; else NaN."""
    column = getattr(batch, name)
    value = getattr(batch.attributes, name)
    if value is None and batch.attributes.engine_fingerprint is not None:
        value = getattr(batch.attributes.engine_fingerprint, name)
    of_all = np.full(batch.num_rollouts, np.nan if value is None else float(value))
    return of_all if column is None else np.where(np.isnan(column), of_all, column)


def _largest(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max(initial=-np.inf))
