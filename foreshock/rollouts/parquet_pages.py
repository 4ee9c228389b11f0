"""Check the page headers of a Parquet body against its footer, without decompressing anything.

A reader allocates memory by what a page header claims. A header must not claim more values or bytes than the footer,
which has been checked against the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.thrift_compact import ThriftError, read_struct

__all__ = ["FILE_ROW_GROUPS", "GROUP_COLUMNS", "GROUP_ROWS", "NAME_CHARACTERS", "ColumnChunk", "check_pages",
           "chunk_metadata", "chunks_of", "number", "structs", "unreadable"]  # fmt: skip

NAME_CHARACTERS = 80

# Field numbers of parquet.thrift, by struct.
FILE_ROW_GROUPS = 4
GROUP_COLUMNS, GROUP_ROWS = 1, 3
_CHUNK_FILE_PATH, _CHUNK_METADATA = 1, 3
_COLUMN_PATH, _COLUMN_VALUES, _COLUMN_UNCOMPRESSED, _COLUMN_COMPRESSED = 3, 5, 6, 7
_COLUMN_DATA_OFFSET, _COLUMN_DICTIONARY_OFFSET = 9, 11
_PAGE_TYPE, _PAGE_UNCOMPRESSED, _PAGE_COMPRESSED, _PAGE_CHECKSUM = 1, 2, 3, 4
_HEADER_VALUES = 1

# Page types, and the field of the page header with the number of values of such a page.
_DATA_PAGES = {0: 5, 3: 8}
_DICTIONARY_PAGE, _DICTIONARY_HEADER = 2, 7


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column in one row group as the footer describes it: sizes in bytes, and the start of its pages."""

    column: str
    values: int
    uncompressed_bytes: int
    compressed_bytes: int
    start: int


def chunks_of(footer: dict[int, Any]) -> list[ColumnChunk]:
    """Return all column chunks of a footer. Raises InvalidRolloutsError if one is not fully described."""
    found = []
    for group in structs(footer, FILE_ROW_GROUPS):
        for chunk in structs(group, GROUP_COLUMNS):
            metadata = chunk_metadata(chunk)
            path = metadata.get(_COLUMN_PATH)
            if not isinstance(path, list) or not path or not isinstance(path[0], bytes):
                raise unreadable("a column has no name")
            start = number(metadata, _COLUMN_DATA_OFFSET)
            dictionary = metadata.get(_COLUMN_DICTIONARY_OFFSET)
            if isinstance(dictionary, int) and 0 < dictionary < start:
                start = dictionary
            found.append(
                ColumnChunk(
                    column=path[0][:NAME_CHARACTERS].decode(errors="replace"),
                    values=number(metadata, _COLUMN_VALUES),
                    uncompressed_bytes=number(metadata, _COLUMN_UNCOMPRESSED),
                    compressed_bytes=number(metadata, _COLUMN_COMPRESSED),
                    start=start,
                )
            )
    return found


def chunk_metadata(chunk: dict[int, Any]) -> dict[int, Any]:
    """Return the metadata of a column chunk. Raises InvalidRolloutsError."""
    metadata = chunk.get(_CHUNK_METADATA)
    # Parquet allows a chunk in another file; such a body is refused.
    if _CHUNK_FILE_PATH in chunk or not isinstance(metadata, dict):
        raise unreadable("a column is not in the file itself")
    return metadata


def check_pages(body: memoryview, chunks: Sequence[ColumnChunk], body_start: int = 0) -> bool:
    """Return whether every page has a checksum; `body` is the file from its byte `body_start` on.

    Raises InvalidRolloutsError if the pages of a chunk claim more than the chunk, or lie outside of the body.
    """
    with_checksums = True
    for chunk in chunks:
        try:
            with_checksums &= _check_chunk(body, chunk, chunk.start - body_start)
        except ThriftError as error:
            raise unreadable(f"a page of `{chunk.column}` is damaged ({error})") from error
    return with_checksums


def _check_chunk(body: memoryview, chunk: ColumnChunk, position: int) -> bool:
    end = position + chunk.compressed_bytes
    if end > body.nbytes:
        raise unreadable(f"the pages of `{chunk.column}` lie outside of it")
    values = uncompressed = 0
    with_checksums = True
    # A reader stops once it has all values: bytes after them are never read.
    while values < chunk.values:
        if position >= end:
            raise unreadable(f"`{chunk.column}` has fewer values than its footer says")
        header, position = read_struct(body, position)
        size = number(header, _PAGE_UNCOMPRESSED)
        with_checksums &= _PAGE_CHECKSUM in header
        position += number(header, _PAGE_COMPRESSED)
        uncompressed += size
        kind = header.get(_PAGE_TYPE)
        if kind in _DATA_PAGES:
            values += _values(header, _DATA_PAGES[kind])
        elif kind == _DICTIONARY_PAGE and _values(header, _DICTIONARY_HEADER) > size:
            raise unreadable(f"the dictionary of `{chunk.column}` has more entries than bytes")
        if values > chunk.values or uncompressed > chunk.uncompressed_bytes or position > end:
            raise unreadable(f"a page of `{chunk.column}` claims more than its footer does")
    # Bytes after the last page of a chunk have no checksum.
    return with_checksums and position == end


def _values(header: dict[int, Any], field: int) -> int:
    struct = header.get(field)
    if not isinstance(struct, dict):
        raise unreadable("a page does not say how many values it has")
    return number(struct, _HEADER_VALUES)


def number(struct: dict[int, Any], field: int) -> int:
    """Return a size, a whole number of at least 0. Raises InvalidRolloutsError."""
    value = struct.get(field)
    if type(value) is not int or value < 0:
        raise unreadable("it lacks a size, or has a negative one")
    return value


def structs(struct: dict[int, Any], field: int, *, required: bool = True) -> list[dict[int, Any]]:
    """Return a list of structs. Raises InvalidRolloutsError."""
    value = struct.get(field, None if required else [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise unreadable("its footer lacks a list")
    return value


def unreadable(reason: str) -> InvalidRolloutsError:
    """Return the error for a file that is not valid Parquet."""
    return InvalidRolloutsError(f"this is not a readable Parquet file: {reason}")
