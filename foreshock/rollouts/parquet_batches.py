"""Decoded Parquet columns as batches, and Arrow's errors as this package's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa

from foreshock.errors import ConfigurationError, InvalidRolloutsError, LimitExceededError, RolloutsError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.exact import ExactBatch
from foreshock.rollouts.parquet_columns import ColumnReader
from foreshock.rollouts.schema import (
    ATTRIBUTES_KEY,
    BEHAVIOUR_FINGERPRINT_KEY,
    EXACT_COLUMNS,
    FINGERPRINT_KEY,
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    SECONDS_KEY,
    TARGET_FINGERPRINT_KEY,
    ColumnSpec,
)
from foreshock.rollouts.scores import ScoreBatch

__all__ = ["arrow_errors", "attributes_of", "to_batch", "to_exact", "to_scores"]

# The required columns give the offsets that the others must have.
_REQUIRED_FIRST = tuple(sorted(ROLLOUT_COLUMNS, key=lambda column: not column.required))


def to_batch(reader: ColumnReader) -> RolloutBatch:
    """Return the rollouts of a table, not yet validated."""
    attributes, _ = attributes_of(reader.metadata.get(ATTRIBUTES_KEY, b"{}"))
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


def attributes_of(text: bytes) -> tuple[BatchAttributes, bool]:
    """Return the attributes in the metadata, and whether the text is that of `to_json`. Raises InvalidRolloutsError."""
    return _known_attributes(text) if len(text) <= _MOST_KNOWN_BYTES else _read_attributes(text)


def _read_attributes(text: bytes) -> tuple[BatchAttributes, bool]:
    attributes = BatchAttributes.from_json(text)
    return attributes, attributes.to_json().encode() == text


# The shards of a run differ in few attributes, if in any.
_MOST_KNOWN_BYTES = 16 << 10
_known_attributes = lru_cache(maxsize=64)(_read_attributes)


def to_scores(reader: ColumnReader) -> ScoreBatch:
    """Return the scores of a table, not yet validated. Raises InvalidRolloutsError if the fingerprint is missing."""
    fingerprint = _fingerprint(reader, FINGERPRINT_KEY)
    names, log_probs = SCORE_COLUMNS
    flat, offsets = reader.ragged(log_probs)
    seconds = _seconds(reader)
    return ScoreBatch(_sample_ids(reader, names), flat, offsets, fingerprint, seconds)


def to_exact(reader: ColumnReader) -> ExactBatch:
    """Return the divergences of a table, not yet validated. Raises InvalidRolloutsError if a fingerprint is missing."""
    names, first, *others = EXACT_COLUMNS
    flat, offsets = reader.ragged(first)
    values: dict[str, Any] = {
        first.field: flat,
        "target_fingerprint": _fingerprint(reader, TARGET_FINGERPRINT_KEY),
        "behaviour_fingerprint": _fingerprint(reader, BEHAVIOUR_FINGERPRINT_KEY),
    }
    for column in others:
        values[column.field], of_column = reader.ragged(column)
        reader.check_lengths(column, of_column, offsets, first.name)
    return ExactBatch(_sample_ids(reader, names), offsets, **values)


def _fingerprint(reader: ColumnReader, key: bytes) -> Fingerprint:
    text = reader.metadata.get(key)
    if text is None:
        raise InvalidRolloutsError(
            f"the Parquet metadata lacks the key {key.decode()!r}: write the fingerprint of the scorer"
        )
    try:
        return Fingerprint.from_json(text)
    except ConfigurationError as error:
        raise InvalidRolloutsError(str(error)) from error


def _seconds(reader: ColumnReader) -> float | None:
    text = reader.metadata.get(SECONDS_KEY)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidRolloutsError(
            f"the Parquet metadata {SECONDS_KEY.decode()!r} must be a number of seconds, got {text[:40]!r}"
        )
    return seconds


def _sample_ids(reader: ColumnReader, column: ColumnSpec) -> list[str]:
    return [name if name is not None else "" for name in reader.strings(column)]


@contextlib.contextmanager
def arrow_errors() -> Iterator[None]:
    """Convert whatever Arrow raises for a damaged or hostile file to an InvalidRolloutsError.

    Errors of the system, which have an `errno`, pass: the file is missing or cannot be read.
    """
    try:
        yield
    except RolloutsError:
        raise
    except MemoryError as error:
        raise LimitExceededError(
            "it needs more memory than is available", advice="send more, smaller shards"
        ) from error
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise InvalidRolloutsError(f"this is not a readable Parquet file: {reason}") from error
