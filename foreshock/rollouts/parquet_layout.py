"""Tell whether a Parquet body is laid out as `encode_rollouts` does it, so that it can be stored as it is.

Encoding a batch again takes as long as decoding it. A body from another writer, such as one with dictionaries, without
page checksums or with one large row group, is encoded again, so that every stored file is read in the same way.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from foreshock.rollouts.parquet_pages import (
    FILE_ROW_GROUPS,
    GROUP_COLUMNS,
    GROUP_ROWS,
    ColumnChunk,
    chunk_metadata,
    number,
    structs,
)
from foreshock.rollouts.schema import ATTRIBUTES_KEY, ColumnSpec

__all__ = ["ROLLOUTS_PER_ROW_GROUP", "Encodings", "has_own_layout", "own_encodings"]

ROLLOUTS_PER_ROW_GROUP = 64

_MAGIC_BYTES = 4
# Field numbers and values of parquet.thrift.
_FILE_KEY_VALUES, _KEY = 5, 1
_ENCODINGS, _CODEC, _STATISTICS = 2, 4, 12
_ZSTD = 6
_PLAIN, _RLE, _RLE_DICTIONARY, _BYTE_STREAM_SPLIT = 0, 3, 8, 9
_KEYS = [b"ARROW:schema", ATTRIBUTES_KEY]


Encodings = tuple[frozenset[int], ...]
"""The encodings that `encode_rollouts` may use for each column of a file."""


def has_own_layout(
    footer: dict[int, Any], chunks: list[ColumnChunk], encodings: Encodings | None, pages_end: int
) -> bool:
    """Return True if columns, row groups, encodings and metadata are those of `encode_rollouts`.

    `encodings` are those of `own_encodings`. Every byte before `pages_end`, where the footer begins, belongs to a page.
    `check_pages` looks for page checksums.
    """
    return (
        encodings is not None
        and _has_own_row_groups(footer)
        and sorted(pair.get(_KEY) or b"" for pair in structs(footer, _FILE_KEY_VALUES, required=False)) == _KEYS
        and _is_without_gaps(chunks, pages_end)
        and _has_own_encodings(footer, encodings)
    )


def own_encodings(schema: pa.Schema, columns: tuple[ColumnSpec, ...]) -> Encodings | None:
    """Return the encodings for the columns of this schema; None if it is not one that `encode_rollouts` writes."""
    if not _has_own_columns(schema, columns):
        return None
    specs = {column.name: column for column in columns}
    return tuple(_encodings_of(specs[field.name], field.type) for field in schema)


def _has_own_columns(schema: pa.Schema, columns: tuple[ColumnSpec, ...]) -> bool:
    own = [column for column in columns if column.name in schema.names]
    if [column.name for column in own] != schema.names:
        return False
    of_column = {column.name: {column.arrow_type(per_token=each) for each in _levels(column)} for column in own}
    return all(field.type in of_column[field.name] for field in schema)


def _levels(column: ColumnSpec) -> tuple[bool, ...]:
    if column.level == "rollout or response token":
        return False, True
    return (column.level != "rollout",)


def _has_own_row_groups(footer: dict[int, Any]) -> bool:
    rows = [number(group, GROUP_ROWS) for group in structs(footer, FILE_ROW_GROUPS)]
    return all(each == ROLLOUTS_PER_ROW_GROUP for each in rows[:-1]) and (rows or [0])[-1] <= ROLLOUTS_PER_ROW_GROUP


def _is_without_gaps(chunks: list[ColumnChunk], end: int) -> bool:
    position = _MAGIC_BYTES
    for chunk in chunks:
        if chunk.start != position:
            return False
        position += chunk.compressed_bytes
    return position == end


def _encodings_of(column: ColumnSpec, given: pa.DataType) -> frozenset[int]:
    if column.is_string:
        return frozenset({_PLAIN, _RLE, _RLE_DICTIONARY})
    return frozenset({_BYTE_STREAM_SPLIT if column.dtype.kind == "f" and pa.types.is_list(given) else _PLAIN, _RLE})


def _has_own_encodings(footer: dict[int, Any], encodings: Encodings) -> bool:
    for group in structs(footer, FILE_ROW_GROUPS):
        for expected, chunk in zip(encodings, structs(group, GROUP_COLUMNS), strict=True):
            metadata = chunk_metadata(chunk)
            found = metadata.get(_ENCODINGS)
            if metadata.get(_CODEC) != _ZSTD or _STATISTICS in metadata or not isinstance(found, list):
                return False
            if not set(found) <= expected:
                return False
    return True
