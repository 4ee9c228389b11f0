"""Count single log-probs that are wrong: not finite, above 0, above 1, or rounded to a shorter type."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.pieces import Piece
from foreshock.lint.report import Example
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.ragged import row_of_position
from foreshock.rollouts.schema import LOG_PROB_ROUNDING

__all__ = ["count_rounding", "count_values", "example_at"]

_MOST_SAMPLED = 1 << 16
# Nearer to 0, float32 log-probs are multiples of a coarse step and often fit into a shorter type by chance.
_LEAST_SIZE = 0.01
# Beyond this few do: a difference of logits in the hundreds still has six bits more than float16.
_LARGE = 0.5


def count_values(batch: RolloutBatch, piece: Piece, name: str, builder: EvidenceBuilder) -> NDArray[np.bool_] | None:
    """Count the invalid values of a column; return a mask [T] of finite values, or None if all are."""
    values = piece.column(name)
    if values is None or values.size == 0:
        return None
    # Two reductions are enough for a valid column: NaN and ±inf show in min() or max().
    least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    builder.count(**{f"{name}_logged": values.size})
    finite: NDArray[np.bool_] | None = None
    if not (math.isfinite(least) and math.isfinite(most)):
        finite = np.isfinite(values)
        nan = int(np.isnan(values).sum())
        minus = int(np.isneginf(values).sum())
        plus = int(values.size - finite.sum()) - nan - minus
        builder.count(**{f"{name}_nan": nan, f"{name}_minus_inf": minus, f"{name}_plus_inf": plus})
        places = np.flatnonzero(~finite)
        first, last = np.isin(places, piece.offsets[:-1]), np.isin(places, piece.offsets[1:] - 1)
        builder.count(**{f"{name}_non_finite_first": int(first.sum()), f"{name}_non_finite_last": int(last.sum())})
        _add_examples(batch, piece, ~finite, "non_finite_log_probs", name, values, builder)
        kept = values[finite]
        least, most = float(kept.min(initial=np.inf)), float(kept.max(initial=-np.inf))
    builder.raise_extremes({f"{name}_max": most, f"{name}_minus_min": -least})
    if most > LOG_PROB_ROUNDING:
        with np.errstate(invalid="ignore"):
            positive = (values > LOG_PROB_ROUNDING) & np.isfinite(values)
            above_one = (values > 1.0 + LOG_PROB_ROUNDING) & np.isfinite(values)
        builder.count(**{f"{name}_positive": int(positive.sum()), f"{name}_above_one": int(above_one.sum())})
        _add_examples(batch, piece, positive, "positive_log_probs", name, values, builder)
    if least < -LOG_PROB_ROUNDING and most > -np.inf:
        with np.errstate(invalid="ignore"):
            below = int(np.count_nonzero(values < -LOG_PROB_ROUNDING))
        builder.count(**{f"{name}_negative": below - (0 if finite is None else int(np.isneginf(values).sum()))})
    return finite


def count_rounding(batch: RolloutBatch, name: str, builder: EvidenceBuilder) -> None:
    """Count the log-probs of an even sample of tokens that fit exactly into bfloat16 or float16."""
    column = batch.rollout_log_probs if name == "rollout" else batch.trainer_log_probs
    if column is None:
        return
    stride = max(1, column.size // _MOST_SAMPLED)
    sample = np.ascontiguousarray(column[::stride])
    sizes = np.abs(sample)
    chosen = (sizes > _LEAST_SIZE) & (sizes < np.inf)
    if batch.response_mask is not None:
        chosen &= batch.response_mask[::stride] != 0
    values = sample[chosen]
    bits = values.view(np.uint32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
        as_half = half.astype(np.float32) == values
    as_bfloat16 = (bits & np.uint32(0xFFFF)) == 0
    large = np.abs(values) >= np.float32(_LARGE)
    # The power of two at or below |x|; a bfloat16 has 7 more bits, a float16 has 10.
    power = (bits & np.uint32(0x7F800000)).view(np.float32).astype(np.float64)
    square = float(np.square(power).sum())
    builder.count(
        **{
            f"{name}_rounding_seen": values.size,
            f"{name}_as_bfloat16": int(np.count_nonzero(as_bfloat16)),
            f"{name}_as_float16": int(np.count_nonzero(as_half)),
            f"{name}_large_seen": int(np.count_nonzero(large)),
            f"{name}_large_as_bfloat16": int(np.count_nonzero(as_bfloat16 & large)),
            f"{name}_large_as_float16": int(np.count_nonzero(as_half & large)),
        }
    )
    builder.add(**{f"{name}_bfloat16_variance": square / 2.0**14, f"{name}_float16_variance": square / 2.0**20})


def example_at(batch: RolloutBatch, place: int, text: str) -> Example:
    """Return a token of the batch as an example; `place` is its position in the flat columns."""
    row = row_of_position(batch.response_offsets, place)
    return Example(batch.sample_ids[row], place - int(batch.response_offsets[row]), text)


def _add_examples(
    batch: RolloutBatch,
    piece: Piece,
    wrong: NDArray[np.bool_],
    check: str,
    name: str,
    values: NDArray[np.float32],
    builder: EvidenceBuilder,
) -> None:
    if not builder.has_room(check):
        return
    for index in np.flatnonzero(wrong)[:3].tolist():
        text = f"{name} log-prob {values[index]:.6g}"
        builder.add_example(check, example_at(batch, piece.place(index), text))
