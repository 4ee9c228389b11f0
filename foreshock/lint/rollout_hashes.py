"""Marks of rollouts, by which one that is there twice is found, within a shard and across the shards of a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.report import Example
from foreshock.lint.tables import RolloutMarks, keys_of_texts
from foreshock.lint.tally import Tally
from foreshock.lint.tokens import row_ranges, row_sums
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["marks_of"]

Keys = NDArray[np.uint64]
_SALT = np.uint64(0x9E3779B97F4A7C15)


def marks_of(batch: RolloutBatch, tally: Tally) -> RolloutMarks:
    """The marks of a batch's rollouts; of none where log μ was not logged or is not finite everywhere."""
    behaviour = batch.rollout_log_probs
    lengths = batch.response_lengths
    if behaviour is None or behaviour.size == 0:
        return _none()
    generated = behaviour if batch.response_mask is None else np.where(batch.response_mask != 0, behaviour, 0)
    log_probs = row_sums(generated, batch.response_offsets)
    prompts = _mix(_weighted_sums(batch.prompt_token_ids, batch.prompt_offsets), np.diff(batch.prompt_offsets))
    bits = _weighted_sums(generated.astype(np.float32, copy=False).view(np.uint32), batch.response_offsets)
    ids = _weighted_sums(batch.response_token_ids, batch.response_offsets)
    contents = _mix(_mix(_mix(prompts, bits), ids), lengths)
    # An empty response says nothing of who sampled it.
    kept = (lengths > 0) & np.isfinite(log_probs)
    marks = RolloutMarks(prompts[kept], contents[kept], keys_of_texts(batch.sample_ids)[kept], log_probs[kept])
    _note_examples(batch, np.flatnonzero(kept), marks, tally)
    return marks


def _note_examples(batch: RolloutBatch, rows: NDArray[np.int64], marks: RolloutMarks, tally: Tally) -> None:
    """The least likely of the rollouts that repeat another one."""
    unique, first, inverse = np.unique(marks.contents, return_index=True, return_inverse=True)
    if unique.size == rows.size:
        return
    repeating = np.flatnonzero(first[inverse] != np.arange(rows.size))
    for index in repeating[np.argsort(marks.log_probs[repeating], kind="stable")][:3].tolist():
        original = batch.sample_ids[rows[first[inverse[index]]]]
        text = f"equals {original} in every token and log-prob; log μ of the whole {marks.log_probs[index]:.4g}"
        tally.example("duplicated_rollouts", Example(batch.sample_ids[rows[index]], -1, text))


def _none() -> RolloutMarks:
    nothing = np.zeros(0, np.uint64)
    return RolloutMarks(nothing, nothing, nothing, np.zeros(0))


def _weighted_sums(values: NDArray[np.integer], offsets: NDArray[np.int64]) -> Keys:
    """[N] sums of whole numbers by their place, modulo 2⁶⁴: the same ones in another order have another sum."""
    sums = np.zeros(offsets.size - 1, np.uint64)
    longest = int(np.diff(offsets).max(initial=0))
    weights = _mix(np.zeros(longest, np.uint64), np.arange(longest))
    for row, end_row in row_ranges(offsets):
        start, end = int(offsets[row]), int(offsets[end_row])
        starts = offsets[row:end_row]
        places = np.arange(start, end) - np.repeat(starts, np.diff(offsets[row : end_row + 1]))
        weighted = weights[places] * (values[start:end].astype(np.uint64) + np.uint64(1))
        filled = np.flatnonzero(np.diff(offsets[row : end_row + 1]))
        if filled.size:
            sums[row + filled] = np.add.reduceat(weighted, starts[filled] - start, dtype=np.uint64)
    return sums


def _mix(keys: Keys, values: NDArray[np.integer]) -> Keys:
    """One key of a key and an integer (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = keys * np.uint64(0xD1342543DE82EF95) + values.astype(np.uint64) + _SALT
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
