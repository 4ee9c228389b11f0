"""Columns derived from a batch: truncation, turns, lag, and means over a rollout's generated tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts.batch import RolloutBatch


def truncated_rollouts(batch: RolloutBatch) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return if each rollout was truncated, [N], and if that is known, [N].

    A rollout is truncated if its finish reason is `length`, or, without a reason, if it is as long as the batch's cap.
    """
    reasons = batch.finish_reasons or [None] * batch.num_rollouts
    known = np.array([reason is not None for reason in reasons], dtype=np.bool_)
    truncated = np.array([reason == "length" for reason in reasons], dtype=np.bool_)
    cap = batch.attributes.length_cap
    if cap is None:
        return truncated, known
    return truncated | (~known & (batch.response_lengths >= cap)), np.ones_like(known)


def turns_of_rollouts(batch: RolloutBatch) -> NDArray[np.int64]:
    """Return the number of turns in which the model sampled, [N]. Raises ValueError if `turn` was not logged."""
    if batch.turn is None:
        raise ValueError("turns_of_rollouts needs the column `turn`, which this batch does not have")
    generated = np.flatnonzero(batch.generated)
    rows = np.repeat(np.arange(batch.num_rollouts), batch.generated_lengths)
    turn = batch.turn[generated]
    begins = np.ones(turn.size, dtype=np.bool_)
    begins[1:] = (turn[1:] != turn[:-1]) | (rows[1:] != rows[:-1])
    return np.bincount(rows[begins], minlength=batch.num_rollouts).astype(np.int64)


def lag_of_tokens(batch: RolloutBatch) -> NDArray[np.integer] | None:
    """Return trainer weights version − the version that sampled, [T]; None if either is unknown."""
    versions, trained = batch.weights_version, batch.attributes.trainer_weights_version
    if versions is None or trained is None:
        return None
    # The difference of two non-negative int32 fits int32, in half the memory.
    fits = 0 <= trained <= np.iinfo(np.int32).max and versions.dtype == np.int32 and versions.min(initial=0) >= 0
    return np.subtract(trained, versions, dtype=np.int32 if fits else np.int64)


def generated_means(batch: RolloutBatch, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of [T] values over each rollout's generated tokens, [N]; NaN if it has none."""
    generated = batch.generated
    filled = np.flatnonzero(batch.response_lengths)
    if generated.all() and filled.size:
        means = np.full(batch.num_rollouts, np.nan)
        means[filled] = np.add.reduceat(values, batch.response_offsets[:-1][filled], dtype=np.float64)
        means[filled] /= batch.response_lengths[filled]
        return means
    rows = np.repeat(np.arange(batch.num_rollouts), batch.generated_lengths)
    totals = np.bincount(rows, weights=values[generated].astype(np.float64), minlength=batch.num_rollouts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return totals / batch.generated_lengths
