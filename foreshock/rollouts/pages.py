"""Column chunks and their pages, as a Parquet file claims them: nothing is decompressed here.

A reader allocates by what a page's header says. So the headers are walked first, and must not claim more values or
bytes than the footer did, which has been held against the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.thrift_compact import ThriftError, read_struct

__all__ = ["FILE_ROW_GROUPS", "NAME_CHARACTERS", "ColumnChunk", "check_pages", "chunks_of", "number", "structs",
           "unreadable"]  # fmt: skip

NAME_CHARACTERS = 80

# Field numbers of parquet.thrift, by struct.
FILE_ROW_GROUPS = 4
_GROUP_COLUMNS = 1
_CHUNK_FILE_PATH, _CHUNK_METADATA = 1, 3
_COLUMN_PATH, _COLUMN_VALUES, _COLUMN_UNCOMPRESSED, _COLUMN_COMPRESSED = 3, 5, 6, 7
_COLUMN_DATA_OFFSET, _COLUMN_DICTIONARY_OFFSET = 9, 11
_PAGE_TYPE, _PAGE_UNCOMPRESSED, _PAGE_COMPRESSED = 1, 2, 3
_HEADER_VALUES = 1

# Page types, and the field of the page header that says how many values such a page holds.
_DATA_PAGES = {0: 5, 3: 8}
_DICTIONARY_PAGE, _DICTIONARY_HEADER = 2, 7


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """What a footer says of one column in one row group: sizes in bytes, and where its pages begin."""

    column: str
    values: int
    uncompressed_bytes: int
    compressed_bytes: int
    start: int


def chunks_of(footer: dict[int, Any]) -> list[ColumnChunk]:
    """All column chunks of a footer. Raises InvalidRolloutsError where one is not fully described."""
    found = []
    for group in structs(footer, FILE_ROW_GROUPS):
        for chunk in structs(group, _GROUP_COLUMNS):
            metadata = chunk.get(_CHUNK_METADATA)
            # A chunk may name another file to be read from; no body of ours does.
            if _CHUNK_FILE_PATH in chunk or not isinstance(metadata, dict):
                raise unreadable("a column is not in the file itself")
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


def check_pages(body: memoryview, chunks: list[ColumnChunk]) -> None:
    """Raise InvalidRolloutsError where the pages of a chunk claim more than the chunk, or leave the body."""
    for chunk in chunks:
        try:
            _check_chunk(body, chunk)
        except ThriftError as error:
            raise unreadable(f"a page of `{chunk.column}` is damaged ({error})") from error


def _check_chunk(body: memoryview, chunk: ColumnChunk) -> None:
    position, end = chunk.start, chunk.start + chunk.compressed_bytes
    if end > body.nbytes:
        raise unreadable(f"the pages of `{chunk.column}` lie outside of it")
    values = uncompressed = 0
    # A reader stops where it has seen all values, so what may follow is never looked at.
    while values < chunk.values:
        if position >= end:
            raise unreadable(f"`{chunk.column}` has fewer values than its footer says")
        header, position = read_struct(body, position)
        size = number(header, _PAGE_UNCOMPRESSED)
        position += number(header, _PAGE_COMPRESSED)
        uncompressed += size
        kind = header.get(_PAGE_TYPE)
        if kind in _DATA_PAGES:
            values += _values(header, _DATA_PAGES[kind])
        elif kind == _DICTIONARY_PAGE and _values(header, _DICTIONARY_HEADER) > size:
            raise unreadable(f"the dictionary of `{chunk.column}` has more entries than bytes")
        if values > chunk.values or uncompressed > chunk.uncompressed_bytes or position > end:
            raise unreadable(f"a page of `{chunk.column}` claims more than its footer does")


def _values(header: dict[int, Any], field: int) -> int:
    struct = header.get(field)
    if not isinstance(struct, dict):
        raise unreadable("a page does not say how many values it has")
    return number(struct, _HEADER_VALUES)


def number(struct: dict[int, Any], field: int) -> int:
    """A size: a whole number that is not negative."""
    value = struct.get(field)
    if type(value) is not int or value < 0:
        raise unreadable("it lacks a size, or has a negative one")
    return value


def structs(struct: dict[int, Any], field: int, *, required: bool = True) -> list[dict[int, Any]]:
    """A list of structs."""
    value = struct.get(field, None if required else [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise unreadable("its footer lacks a list")
    return value


def unreadable(reason: str) -> InvalidRolloutsError:
    """The error of a file that is not what it says it is."""
    return InvalidRolloutsError(f"this is not a readable Parquet file: {reason}")
