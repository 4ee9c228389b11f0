"""Convert decoded Parquet columns to batches of numpy arrays without changing a value.

A value that does not fit into its column's type is an error that names its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foreshock.errors import ConfigurationError, InvalidRolloutsError, LimitExceededError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.arrays import lengths_of_offsets, offsets_of_lengths, row_of_position
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import (
    ATTRIBUTES_KEY,
    FINGERPRINT_KEY,
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    ColumnSpec,
    DecodeLimits,
)
from foreshock.rollouts.scores import ScoreBatch

# The required columns give the offsets that the others must have.
_REQUIRED_FIRST = tuple(sorted(ROLLOUT_COLUMNS, key=lambda column: not column.required))


def to_batch(reader: ColumnReader) -> RolloutBatch:
    """Return the rollouts of a table, not yet validated."""
    attributes = BatchAttributes.from_json(reader.metadata.get(ATTRIBUTES_KEY, b"{}"))
    values: dict[str, Any] = {}
    per_token = False
    for column in _REQUIRED_FIRST:
        if not reader.has(column):
            continue
        if column.is_string:
            values[column.field] = reader.strings(column)
        elif reader.is_list(column):
            values[column.field], offsets = reader.ragged(column)
            expected = values.setdefault(f"{column.side}_offsets", offsets)
            reader.check_lengths(column, offsets, expected, f"{column.side}_token_ids")
            per_token |= column.level == "rollout or response token"
        else:
            values[column.field] = reader.numbers(column, null_value=attributes.null_value(column))
    return RolloutBatch(**values, attributes=attributes, advantage_per_token=per_token)


def to_scores(reader: ColumnReader) -> ScoreBatch:
    """Return the scores of a table, not yet validated. Raises InvalidRolloutsError if the fingerprint is missing."""
    text = reader.metadata.get(FINGERPRINT_KEY)
    if text is None:
        raise InvalidRolloutsError(
            f"the Parquet metadata lacks the key {FINGERPRINT_KEY.decode()!r}: write the fingerprint of the scorer"
        )
    try:
        fingerprint = Fingerprint.from_json(text)
    except ConfigurationError as error:
        raise InvalidRolloutsError(str(error)) from error
    names, log_probs = SCORE_COLUMNS
    flat, offsets = reader.ragged(log_probs)
    sample_ids = [name if name is not None else "" for name in reader.strings(names)]
    return ScoreBatch(sample_ids, flat, offsets, fingerprint)


class ColumnReader:
    """The columns of a decoded table, whose types `parquet_files.py` has accepted. Each can be read once.

    A column is released when it is read: otherwise a shard of 60 million tokens would be in memory twice.
    """

    def __init__(self, table: pa.Table, limits: DecodeLimits) -> None:
        self._columns: dict[str, pa.ChunkedArray] = dict(zip(table.column_names, table.columns, strict=True))
        self._limits = limits
        self.metadata: dict[bytes, bytes] = dict(table.schema.metadata or {})

    def has(self, column: ColumnSpec) -> bool:
        """Return True if the table has the column."""
        return column.name in self._columns

    def is_list(self, column: ColumnSpec) -> bool:
        """Return True if the table has the column, with a list in each row."""
        return self.has(column) and is_list_type(self._columns[column.name].type)

    def strings(self, column: ColumnSpec) -> list[Any]:
        """Return one string or None per row. Raises InvalidRolloutsError for a null in a required column."""
        array = self._columns.pop(column.name)
        if column.required and array.null_count:
            self._refuse_null(column, array)
        longest = max((_longest(chunk) for chunk in array.chunks), default=0)
        if longest > self._limits.max_identifier_bytes:
            raise LimitExceededError(
                f"holds a text of {longest:,} bytes, more than {self._limits.max_identifier_bytes:,}: shorten it",
                column=column.name,
            )
        return [value for chunk in array.chunks for value in _texts(chunk)]

    def numbers(self, column: ColumnSpec, *, null_value: float | None) -> NDArray[Any]:
        """Return one number per row, `null_value` for a null. If that is None, a null raises InvalidRolloutsError."""
        array = _one_chunk(self._columns.pop(column.name))
        if null_value is None and array.null_count:
            self._refuse_null(column, array)
        if not array.null_count:
            return _convert(column, array, None)
        values = _convert(column, array.fill_null(0), None).copy()
        values[np.asarray(array.is_null())] = null_value
        return values

    def ragged(self, column: ColumnSpec) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the flat values and the offsets [N + 1] of a list column. Raises InvalidRolloutsError for a null."""
        chunks = self._columns.pop(column.name)
        if chunks.null_count:
            self._refuse_null(column, chunks)
        lengths = pc.list_value_length(chunks)
        offsets = offsets_of_lengths(lengths.to_numpy().astype(np.int64))
        flat = _one_chunk(pc.list_flatten(chunks))
        if flat.null_count:
            position = int(np.argmax(np.asarray(flat.is_null())))
            row = row_of_position(offsets, position)
            raise InvalidRolloutsError(
                f"the value at token {position - int(offsets[row])} is null: write NaN for a missing number",
                row=row,
                column=column.name,
            )
        return _convert(column, flat, offsets), offsets

    def check_lengths(
        self, column: ColumnSpec, offsets: NDArray[np.int64], expected: NDArray[np.int64], against: str
    ) -> None:
        """Raise InvalidRolloutsError for the first row whose list is not as long as that of the column `against`."""
        if offsets is expected or np.array_equal(offsets, expected):
            return
        lengths, expected_lengths = lengths_of_offsets(offsets), lengths_of_offsets(expected)
        wrong = lengths != expected_lengths
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InvalidRolloutsError(
                f"has {lengths[row]} values, but `{against}` has {expected_lengths[row]}: log one value per token",
                row=row,
                column=column.name,
            )

    def _refuse_null(self, column: ColumnSpec, array: pa.ChunkedArray | pa.Array) -> None:
        row = int(np.argmax(np.asarray(array.is_null())))
        if column.side is None:
            message = "is missing or empty: give it a value"
        elif column.required:
            message = "is null: write an empty list"
        else:
            message = "is null: write one value per token, or leave the column out"
        raise InvalidRolloutsError(message, row=row, column=column.name)


def is_list_type(kind: pa.DataType) -> bool:
    """Return True for the types that a list column may have."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _longest(strings: pa.Array) -> int:
    """Return the bytes of the longest string; every entry of a dictionary counts, used or not."""
    values = strings.dictionary if pa.types.is_dictionary(strings.type) else strings
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        values = values.cast(pa.large_string())
    length = pc.max(pc.binary_length(values)).as_py()
    return int(length or 0)


def _texts(strings: pa.Array) -> list[Any]:
    """Return a chunk as a list.

    Arrow makes an object for each value of a dictionary array; looking its index up takes a tenth of the time.
    """
    if not pa.types.is_dictionary(strings.type):
        texts: list[Any] = strings.to_pylist()
        return texts
    entries = strings.dictionary.to_pylist()
    return [None if index is None else entries[index] for index in strings.indices.to_pylist()]


def _one_chunk(chunks: pa.ChunkedArray) -> pa.Array:
    if chunks.num_chunks == 1:
        return chunks.chunk(0)
    return pa.concat_arrays(chunks.chunks) if chunks.num_chunks else pa.array([], type=chunks.type)


def _convert(column: ColumnSpec, array: pa.Array, offsets: NDArray[np.int64] | None) -> NDArray[Any]:
    """Return `array`, without nulls, in the column's type. Raises InvalidRolloutsError if an integer does not fit."""
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if values.dtype == column.dtype:
        return values
    if column.dtype.kind in "iu":
        held = np.iinfo(column.dtype)
        wrong = (values < held.min) | (values > held.max)
        if wrong.any():
            position = int(np.argmax(wrong))
            row = position if offsets is None else row_of_position(offsets, position)
            raise InvalidRolloutsError(
                f"{values[position]} does not fit into {column.value_type}", row=row, column=column.name
            )
    with np.errstate(over="ignore"):
        converted: NDArray[Any] = values.astype(column.dtype)
    return converted
