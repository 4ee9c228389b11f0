"""The rules of the rollout table that a type cannot say. Every error names the first row that breaks a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts.limits import DecodeLimits
from foreshock.rollouts.ragged import row_of_position
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, ColumnSpec
from foreshock.rollouts.scores import ScoreBatch

__all__ = ["LOG_PROB_ROUNDING", "validate_rollouts", "validate_scores"]

# A log-softmax in bfloat16 or float32 can come out this much above 0 for a certain token.
LOG_PROB_ROUNDING = 1e-4

_AT_LEAST_ZERO = frozenset({"prompt_token_ids", "response_token_ids", "turn", "weights_version"})


class RolloutColumns(Protocol):
    """What is checked: the fields of RolloutBatch, which builds on this module and so cannot be named here."""

    @property
    def sample_ids(self) -> list[str]: ...
    @property
    def prompt_token_ids(self) -> NDArray[np.int32]: ...
    @property
    def prompt_offsets(self) -> NDArray[np.int64]: ...
    @property
    def response_token_ids(self) -> NDArray[np.int32]: ...
    @property
    def response_offsets(self) -> NDArray[np.int64]: ...

    def per_token(self, column: ColumnSpec) -> bool:
        """Whether `column` holds one value per token."""


def validate_rollouts(batch: RolloutColumns, limits: DecodeLimits | None = None, *, check_values: bool = True) -> None:
    """Raise InvalidRolloutsError or LimitExceededError, naming row and column, where `batch` breaks a rule.

    Checked: there are rows; sample ids are there, short and unique; all lists of a rollout have equal lengths; ids and
    versions are not negative; the mask is 0 or 1; log-probs are not above 0 beyond rounding. NaN and ±inf log-probs
    pass: they are counted apart when measured. `check_values` False: only shapes are checked and not what numbers say,
    so that the semantics lint can name what is wrong with them.
    """
    limits = limits or DecodeLimits()
    check_sample_ids(batch.sample_ids, limits)
    rollouts, tokens = len(batch.sample_ids), batch.response_token_ids.size
    _check_offsets("prompt_token_ids", batch.prompt_offsets, rollouts, batch.prompt_token_ids.size, limits)
    _check_offsets("response_token_ids", batch.response_offsets, rollouts, tokens, limits)
    for column in ROLLOUT_COLUMNS:
        value = getattr(batch, column.field)
        if value is None or column.shape == "prompt":
            continue
        expected = tokens if batch.per_token(column) else rollouts
        if len(value) != expected:
            per = "response token" if batch.per_token(column) else "rollout"
            raise InvalidRolloutsError(
                f"has {len(value)} values and must have {expected}: one per {per}", column=column.name
            )
    if check_values:
        _check_values(batch)
    for column in ROLLOUT_COLUMNS:
        if column.value_type == "string" and not column.required:
            _check_strings(column.name, getattr(batch, column.field), limits)


def validate_scores(scores: ScoreBatch, limits: DecodeLimits | None = None) -> None:
    """Raise InvalidRolloutsError or LimitExceededError, naming row and column, where `scores` break a rule."""
    limits = limits or DecodeLimits()
    check_sample_ids(scores.sample_ids, limits)
    _check_offsets("log_probs", scores.offsets, len(scores.sample_ids), scores.log_probs.size, limits)
    _check_log_probs("log_probs", scores.log_probs, scores.offsets)


def check_sample_ids(sample_ids: Sequence[str], limits: DecodeLimits) -> None:
    """Rollouts must be there, not too many, and each named once."""
    if len(sample_ids) == 0:
        raise InvalidRolloutsError("there are no rows: send at least one rollout", column="sample_id")
    if len(sample_ids) > limits.max_rollouts:
        raise LimitExceededError(
            f"{len(sample_ids):,} rollouts are more than the {limits.max_rollouts:,} of one shard: send more shards"
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
        # A character is at least one byte, so most texts are settled by their length alone.
        if len(text) * 4 > limits.max_identifier_bytes and len(text.encode(errors="replace")) > (
            limits.max_identifier_bytes
        ):
            raise LimitExceededError(
                f"is longer than {limits.max_identifier_bytes} bytes: use a shorter name", row=row, column=name
            )


def _check_offsets(name: str, offsets: NDArray[np.int64], rollouts: int, values: int, limits: DecodeLimits) -> None:
    """Offsets must be those of `rollouts` rows over `values` values, and no row longer than allowed."""
    if offsets.size != rollouts + 1:
        raise InvalidRolloutsError(
            f"has {offsets.size - 1} rows where `sample_id` has {rollouts}: offsets need N + 1 entries", column=name
        )
    lengths = np.diff(offsets)
    if int(offsets[0]) != 0 or int(offsets[-1]) != values or bool((lengths < 0).any()):
        raise InvalidRolloutsError(f"its offsets must rise from 0 to the {values} values that there are", column=name)
    if values > limits.max_tokens:
        raise LimitExceededError(
            f"{values:,} tokens are more than the {limits.max_tokens:,} of one shard: send more shards", column=name
        )
    longest = limits.max_prompt_tokens if name == "prompt_token_ids" else limits.max_response_tokens
    if int(lengths.max(initial=0)) > longest:
        row = int(np.argmax(lengths > longest))
        raise LimitExceededError(
            f"has {int(lengths[row]):,} tokens, more than the {longest:,} of one rollout", row=row, column=name
        )


def _check_values(batch: RolloutColumns) -> None:
    """Check every numeric column against its range."""
    for column in ROLLOUT_COLUMNS:
        value = getattr(batch, column.field)
        if value is None or column.value_type == "string":
            continue
        offsets = _offsets_for(batch, column)
        if column.log_probs:
            _check_log_probs(column.name, value, offsets)
        elif column.field in _AT_LEAST_ZERO:
            _refuse(column.name, value, value < 0, offsets, "is negative: ids and versions start at 0")
        elif column.field == "response_mask":
            _refuse(column.name, value, value > 1, offsets, "must be 0 or 1")
        elif column.field == "top_k":
            _refuse(column.name, value, value < -1, offsets, "must be at least -1, which means all tokens")
        elif column.field in ("temperature", "top_p", "min_p"):
            _refuse(column.name, value, value < 0, offsets, "must not be negative")


def _offsets_for(batch: RolloutColumns, column: ColumnSpec) -> NDArray[np.int64] | None:
    if not batch.per_token(column):
        return None
    return batch.prompt_offsets if column.shape == "prompt" else batch.response_offsets


def _check_log_probs(name: str, values: NDArray[np.float32], offsets: NDArray[np.int64] | None) -> None:
    # +inf is not a positive log-prob but a broken one, and is counted with the non-finite.
    too_high = (values > LOG_PROB_ROUNDING) & (values < np.inf)
    _refuse(name, values, too_high, offsets, "is above 0: log natural-log probabilities, not probabilities or logits")


def _refuse(
    name: str, values: NDArray[Any], wrong: NDArray[np.bool_], offsets: NDArray[np.int64] | None, message: str
) -> None:
    """Raise for the first True of `wrong`, saying its value, its row and its place in the list."""
    if not wrong.any():
        return
    position = int(np.argmax(wrong))
    if offsets is None:
        raise InvalidRolloutsError(f"{values[position]} {message}", row=position, column=name)
    row = row_of_position(offsets, position)
    raise InvalidRolloutsError(
        f"{values[position]} at token {position - int(offsets[row])} {message}", row=row, column=name
    )
