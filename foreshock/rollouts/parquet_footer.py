"""Check the footer of a Parquet body before any value is decoded.

The footer has a few kilobytes and gives the decoded size: rows, row groups, and per column chunk the number of values
and their uncompressed bytes. A body that claims more than the limits allow is refused, and so is one whose pages claim
more than its footer (`parquet_pages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts.limits import DecodeLimits
from foreshock.rollouts.parquet_layout import Encodings, has_own_layout, own_encodings
from foreshock.rollouts.parquet_pages import (
    FILE_ROW_GROUPS,
    GROUP_ROWS,
    NAME_CHARACTERS,
    ColumnChunk,
    check_pages,
    chunks_of,
    number,
    structs,
    unreadable,
)
from foreshock.rollouts.schema import ColumnSpec
from foreshock.rollouts.thrift_compact import ThriftError, read_struct

__all__ = ["CheckedFile", "bounds_of", "check_claims", "check_schema", "footer_bytes_of", "open_checked", "read_footer"]

_MAGIC = b"PAR1"
_TRAILER_BYTES = 8

# Field numbers of parquet.thrift, by struct.
_FILE_SCHEMA, _FILE_ROWS, _FILE_KEY_VALUES = 2, 3, 5
_KEY, _VALUE = 1, 2

# A value as it is decoded: float32, int32, or the index into a dictionary of strings.
_DECODED_BYTES = 4


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A body whose footer and page headers are checked; `own_layout`: it is laid out as `encode_rollouts` does it."""

    file: pq.ParquetFile
    own_layout: bool


def open_checked(body: pa.Buffer, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> CheckedFile:
    """Return the opened file after checking its footer against `limits` and `columns`.

    Raises InvalidRolloutsError or LimitExceededError; Arrow's own errors pass through to the caller.
    """
    view = memoryview(body)
    if view.nbytes < len(_MAGIC) or bytes(view[:4]) != _MAGIC:
        raise _not_parquet()
    footer, schema_bytes, footer_start = _read_footer(view, view.nbytes, limits)
    chunks = chunks_of(footer)
    check_claims(footer, chunks, limits)
    # A memoryview of an Arrow buffer has signed bytes.
    with_checksums = check_pages(memoryview(body).cast("B"), chunks)
    bounds, metadata = bounds_of(limits), None
    key = (columns, schema_bytes)
    known = _known_schemas.get(key)
    if known is None:
        file = pq.ParquetFile(pa.BufferReader(body), **bounds)
        metadata = file.metadata
        known = _CheckedSchema.of(file.schema_arrow, columns)
        if len(schema_bytes) <= _MOST_KNOWN_BYTES:
            if len(_known_schemas) >= _MOST_KNOWN:
                _known_schemas.clear()
            _known_schemas[key] = known
    own = with_checksums and has_own_layout(footer, chunks, known.own_encodings, footer_start)
    file = pq.ParquetFile(
        pa.BufferReader(body), metadata=metadata, read_dictionary=known.strings, page_checksum_verification=True,
        **bounds,
    )  # fmt: skip
    return CheckedFile(file, own)


@dataclass(frozen=True, slots=True)
class _CheckedSchema:
    """What follows from an accepted schema: the columns of strings, and the encodings if it is an own one.

    Strings stay dictionaries, so that a long string repeated in every row takes its memory once.
    """

    strings: list[str]
    own_encodings: Encodings | None

    @classmethod
    def of(cls, schema: pa.Schema, columns: tuple[ColumnSpec, ...]) -> _CheckedSchema:
        """Check a schema. Raises InvalidRolloutsError."""
        check_schema(schema, columns)
        strings = {column.name for column in columns if column.is_string}
        return cls(sorted(strings.intersection(schema.names)), own_encodings(schema, columns))


# The shards of a run have the same schema. It follows from the bytes of the footer's schema and metadata alone; to open
# and check it anew takes 80 µs of a small shard's time. At most 1 MB is kept.
_known_schemas: dict[tuple[tuple[ColumnSpec, ...], bytes], _CheckedSchema] = {}
_MOST_KNOWN, _MOST_KNOWN_BYTES = 64, 16 << 10


def bounds_of(limits: DecodeLimits) -> dict[str, int]:
    """Return Arrow's bounds on the footer."""
    return {
        "thrift_string_size_limit": limits.max_footer_bytes,
        "thrift_container_size_limit": limits.max_footer_bytes,
    }


def footer_bytes_of(end: memoryview | bytes, limits: DecodeLimits) -> int:
    """Return the bytes of the footer with its trailer, the size and PAR1, from the end of a file."""
    if len(end) < len(_MAGIC) + _TRAILER_BYTES or bytes(end[-4:]) != _MAGIC:
        raise _not_parquet()
    footer_bytes = int.from_bytes(end[-8:-4], "little")
    if footer_bytes > limits.max_footer_bytes:
        raise LimitExceededError(
            f"the footer has {footer_bytes:,} bytes, more than {limits.max_footer_bytes:,}: write larger row groups"
        )
    return footer_bytes + _TRAILER_BYTES


def read_footer(end: memoryview | bytes, file_bytes: int, limits: DecodeLimits) -> tuple[dict[int, Any], int]:
    """Return the decoded footer and its place in a file of so many bytes; `end` are the last of them.

    Raises InvalidRolloutsError or LimitExceededError.
    """
    footer, _, start = _read_footer(end, file_bytes, limits)
    return footer, start


def _read_footer(end: memoryview | bytes, file_bytes: int, limits: DecodeLimits) -> tuple[dict[int, Any], bytes, int]:
    """Return what `read_footer` does, and between them the bytes of the footer that describe its schema."""
    footer_bytes = footer_bytes_of(end, limits)
    if footer_bytes > file_bytes - len(_MAGIC) or footer_bytes > len(end):
        raise unreadable("its footer is cut off")
    data = bytes(end[-footer_bytes:-_TRAILER_BYTES])
    try:
        spans: dict[int, tuple[int, int]] = {}
        footer, _ = read_struct(data, spans=spans)
    except ThriftError as error:
        raise unreadable(f"its footer is damaged ({error})") from error
    # Lengths keep two different pairs of parts apart.
    of_schema, of_metadata = (data[slice(*spans.get(field, (0, 0)))] for field in (_FILE_SCHEMA, _FILE_KEY_VALUES))
    return footer, b"%d:%b%b" % (len(of_schema), of_schema, of_metadata), file_bytes - footer_bytes


def _not_parquet() -> InvalidRolloutsError:
    return InvalidRolloutsError("this is not a Parquet file", advice="send the bytes that `encode_rollouts` returns")


def check_claims(footer: dict[int, Any], chunks: list[ColumnChunk], limits: DecodeLimits) -> None:
    """Check the numbers of rows and row groups, the bytes of metadata, and the claims of the column chunks."""
    rows = number(footer, _FILE_ROWS)
    groups = structs(footer, FILE_ROW_GROUPS)
    if len(groups) > limits.max_row_groups:
        raise LimitExceededError(
            f"{len(groups):,} row groups are more than {limits.max_row_groups:,}: write larger ones"
        )
    if rows > limits.max_rollouts:
        raise LimitExceededError(
            f"{rows:,} rollouts are more than the {limits.max_rollouts:,} of one shard", advice="send more shards"
        )
    if rows == 0:
        raise InvalidRolloutsError("there are no rows", advice="send at least one rollout")
    if sum(number(group, GROUP_ROWS) for group in groups) != rows:
        raise unreadable("its row groups do not add up to its rows")
    for item in structs(footer, _FILE_KEY_VALUES, required=False):
        key, value = item.get(_KEY, b""), item.get(_VALUE, b"")
        if not isinstance(key, bytes) or not isinstance(value, bytes):
            raise unreadable("its metadata is damaged")
        if len(value) > limits.max_metadata_bytes:
            name = key[:NAME_CHARACTERS].decode(errors="replace")
            raise LimitExceededError(f"the metadata {name!r} has more than {limits.max_metadata_bytes:,} bytes")
    _check_chunks(chunks, rows, limits)


def _check_chunks(chunks: list[ColumnChunk], rows: int, limits: DecodeLimits) -> None:
    """Check the values that the column chunks claim, and their decoded size."""
    values: dict[str, int] = {}
    for chunk in chunks:
        values[chunk.column] = values.get(chunk.column, 0) + chunk.values
    for name, count in values.items():
        # A footer counts an empty list as one value.
        if count > limits.max_tokens + rows:
            raise LimitExceededError(
                f"{count:,} tokens are more than the {limits.max_tokens:,} of one shard",
                column=name,
                advice="send more shards",
            )
    # Run-length encoding stores a million equal values in a few bytes: sizes of pages do not bound the decoded size.
    decoded = max(sum(chunk.uncompressed_bytes for chunk in chunks), _DECODED_BYTES * sum(values.values()))
    if decoded > limits.max_uncompressed_bytes:
        raise LimitExceededError(
            f"it decodes to {decoded:,} bytes, more than {limits.max_uncompressed_bytes:,}",
            advice="send more, smaller shards",
        )


def check_schema(schema: pa.Schema, columns: tuple[ColumnSpec, ...]) -> None:
    """Check that the columns are those of the schema, each once, of a type that can hold its values."""
    specs = {column.name: column for column in columns}
    seen: set[str] = set()
    for field in schema:
        if field.name not in specs:
            raise InvalidRolloutsError(
                f"is not a column of the schema: leave it out (the columns are {', '.join(specs)})",
                column=field.name[:NAME_CHARACTERS],
            )
        if field.name in seen:
            raise InvalidRolloutsError("appears twice: write each column once", column=field.name)
        seen.add(field.name)
        if not _accepts(specs[field.name], field.type):
            raise InvalidRolloutsError(
                f"must be {specs[field.name].type_name()}, got {str(field.type)[:NAME_CHARACTERS]}",
                column=field.name,
            )
    for column in columns:
        if column.required and column.name not in seen:
            raise InvalidRolloutsError(f"is missing: it is required, as {column.type_name()}", column=column.name)


def _accepts(column: ColumnSpec, given: pa.DataType) -> bool:
    """Return True if `given` is the column's type or one that holds the same values (see `schema.py`)."""
    is_list = pa.types.is_list(given) or pa.types.is_large_list(given) or pa.types.is_fixed_size_list(given)
    if column.level != "rollout or response token" and is_list != (column.side is not None):
        return False
    values = given.value_type if is_list or pa.types.is_dictionary(given) else given
    if column.is_string:
        is_view = getattr(pa.types, "is_string_view", lambda _type: False)
        return bool(pa.types.is_string(values) or pa.types.is_large_string(values) or is_view(values))
    if pa.types.is_dictionary(given):
        return False
    if column.dtype.kind == "f":
        return bool(pa.types.is_floating(values))
    return bool(pa.types.is_integer(values))
