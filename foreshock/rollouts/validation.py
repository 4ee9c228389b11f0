"""Validate rollouts, scores and divergences beyond their types. Every error names the first row that breaks a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts.arrays import lengths_of_offsets, row_of_position
from foreshock.rollouts.schema import (
    LARGEST_LOG_PROB,
    LOG_PROB_ROUNDING,
    LOG_PROBS,
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    ColumnSpec,
    DecodeLimits,
)
from foreshock.rollouts.scores import ScoreBatch

if TYPE_CHECKING:
    from foreshock.rollouts.batch import RolloutBatch


def validate_rollouts(batch: RolloutBatch, limits: DecodeLimits | None = None, *, check_values: bool = True) -> None:
    """Raise InvalidRolloutsError or LimitExceededError, naming row and column, if `batch` breaks a rule.

    There must be rows; sample ids must be present, short and unique; all lists of a rollout must have equal lengths;
    values must lie in the range that the schema declares. NaN, infinite and single other values that are no log-probs
    are accepted among log-probs: measures count them separately. With `check_values=False` values are not checked, so
    that the semantics lint can report what is wrong with them.
    """
    limits = limits or DecodeLimits()
    check_sample_ids(batch.sample_ids, limits)
    rollouts, tokens = len(batch.sample_ids), batch.response_token_ids.size
    _check_offsets("prompt_token_ids", batch.prompt_offsets, rollouts, batch.prompt_token_ids.size, limits)
    _check_offsets("response_token_ids", batch.response_offsets, rollouts, tokens, limits)
    for column in ROLLOUT_COLUMNS:
        value = getattr(batch, column.field)
        if value is None:
            continue
        offsets = batch.offsets_of(column)
        expected = rollouts if offsets is None else int(offsets[-1])
        if len(value) != expected:
            per = "rollout" if offsets is None else f"{column.side} token"
            raise InvalidRolloutsError(
                f"has {len(value)} values and must have {expected}: one per {per}", column=column.name
            )
    generated = None if batch.response_mask is None else batch.response_mask != 0
    for column in ROLLOUT_COLUMNS if check_values else ():
        if (value := getattr(batch, column.field)) is not None:
            _check_range(column, value, batch.offsets_of(column), generated)
    for column in ROLLOUT_COLUMNS:
        if column.is_string and not column.required:
            _check_strings(column.name, getattr(batch, column.field), limits)


def validate_scores(scores: ScoreBatch, limits: DecodeLimits | None = None) -> None:
    """Raise InvalidRolloutsError or LimitExceededError, naming row and column, if `scores` break a rule."""
    limits = limits or DecodeLimits()
    check_sample_ids(scores.sample_ids, limits)
    _, column = SCORE_COLUMNS
    _check_offsets(column.name, scores.offsets, len(scores.sample_ids), scores.log_probs.size, limits)
    _check_range(column, scores.log_probs, scores.offsets, allow_few=False)


def check_sample_ids(sample_ids: Sequence[str], limits: DecodeLimits) -> None:
    """Raise InvalidRolloutsError or LimitExceededError for no rows, too many, or an id that is missing or repeated."""
    if len(sample_ids) == 0:
        raise InvalidRolloutsError("there are no rows", column="sample_id", advice="send at least one rollout")
    if len(sample_ids) > limits.max_rollouts:
        raise LimitExceededError(
            f"{len(sample_ids):,} rollouts are more than the {limits.max_rollouts:,} of one shard",
            advice="send more shards",
        )
    _check_strings("sample_id", sample_ids, limits)
    first_rows: dict[str, int] = {}
    for row, sample_id in enumerate(sample_ids):
        if not sample_id:
            raise InvalidRolloutsError("is missing or empty: give each rollout an id", row=row, column="sample_id")
        first = first_rows.setdefault(sample_id, row)
        if first != row:
            raise InvalidRolloutsError(
                f"{sample_id[:80]!r} is the id of row {first} too: ids must be unique in a shard",
                row=row,
                column="sample_id",
            )


def _check_strings(name: str, strings: Sequence[str | None] | None, limits: DecodeLimits) -> None:
    for row, text in enumerate(strings or ()):
        if text is None:
            continue
        if not isinstance(text, str):
            raise InvalidRolloutsError(f"must be a string, not {type(text).__name__}", row=row, column=name)
        # A character has at most four bytes: most strings are short enough by their length alone.
        if len(text) * 4 > limits.max_identifier_bytes and len(text.encode(errors="replace")) > (
            limits.max_identifier_bytes
        ):
            raise LimitExceededError(
                f"is longer than {limits.max_identifier_bytes} bytes: use a shorter name", row=row, column=name
            )


def _check_offsets(name: str, offsets: NDArray[np.int64], rollouts: int, values: int, limits: DecodeLimits) -> None:
    """Raise unless the offsets cut `values` values into `rollouts` rows, with no row above the limit."""
    if offsets.size != rollouts + 1:
        raise InvalidRolloutsError(
            f"has {offsets.size - 1} rows, but `sample_id` has {rollouts}: offsets need N + 1 entries", column=name
        )
    lengths = lengths_of_offsets(offsets)
    if int(offsets[0]) != 0 or int(offsets[-1]) != values or bool((lengths < 0).any()):
        raise InvalidRolloutsError(
            f"its offsets must start at 0, never fall, and end at {values}, the number of values", column=name
        )
    if values > limits.max_tokens:
        raise LimitExceededError(
            f"{values:,} tokens are more than the {limits.max_tokens:,} of one shard",
            column=name,
            advice="send more shards",
        )
    longest = limits.max_prompt_tokens if name == "prompt_token_ids" else limits.max_response_tokens
    if int(lengths.max(initial=0)) > longest:
        row = int(np.argmax(lengths > longest))
        raise LimitExceededError(
            f"has {int(lengths[row]):,} tokens, more than the {longest:,} of one rollout", row=row, column=name
        )


def _check_range(
    column: ColumnSpec,
    values: NDArray[Any],
    offsets: NDArray[np.int64] | None,
    generated: NDArray[np.bool_] | None = None,
    *,
    allow_few: bool = True,
) -> None:
    """Raise for the first value out of range, with its value, its row and its place in the list.

    With `allow_few`, log-probs are refused only if the column as a whole holds something else; `generated` [T] is True
    for the tokens that count.
    """
    if column.valid is None:
        return
    wrong = column.valid.invalid(values)
    if not wrong.any():
        return
    if column.valid is LOG_PROBS and allow_few:
        if not _hold_no_log_probs(values if generated is None else values[generated]):
            return
        wrong = wrong if generated is None else wrong & generated
    position = int(np.argmax(wrong))
    if offsets is None:
        raise InvalidRolloutsError(f"{values[position]} {column.valid.rule}", row=position, column=column.name)
    row = row_of_position(offsets, position)
    place = position - int(offsets[row])
    raise InvalidRolloutsError(f"{values[position]} at token {place} {column.valid.rule}", row=row, column=column.name)


# From this many values on, a column without a single negative one is not a rounded log-softmax.
_LEAST_VALUES = 20


def _hold_no_log_probs(values: NDArray[np.floating[Any]]) -> bool:
    """Return True if more than half of the finite values are above any rounding, or if nearly all are above 0."""
    finite = values[np.isfinite(values)]
    beyond = int(np.count_nonzero(finite > LARGEST_LOG_PROB))
    above = int(np.count_nonzero(finite > LOG_PROB_ROUNDING))
    return bool(beyond > 0.5 * finite.size or (finite.size >= _LEAST_VALUES and above >= 0.99 * finite.size))
