"""Read Thrift's compact protocol, the format of Parquet's footers and page headers.

Arrow's own view of a column chunk (`RowGroupMetaData.column`) crashes the process on some damaged footers, and its
sizes are needed before anything is decoded. This reader takes bounded time and depth: a value has at least one byte.

The footer of a small shard has some 90 structs and 400 numbers: functions that pass the position on, with the numbers
of one byte read in place, take 40 % less time than an object with a method for each kind of value.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ThriftError", "read_struct"]

_MAX_DEPTH = 24
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_DOUBLE_BYTES = 8

_Data = bytes | memoryview


class ThriftError(ValueError):
    """The bytes are not a struct in the compact protocol."""


def read_struct(
    data: _Data, position: int = 0, spans: dict[int, tuple[int, int]] | None = None
) -> tuple[dict[int, Any], int]:
    """Return the struct at `position`, as field numbers to values, and the position of its end.

    `spans` is filled with where each of its fields begins and ends, its type included; that of a repeated field goes
    from its first to its last.

    Values are integers, bytes, lists, booleans or structs; doubles and maps, which no size uses, are None. Raises
    ThriftError if there is no struct.
    """
    try:
        return _struct(data, position, 0, spans)
    except IndexError:
        raise ThriftError("the data ends inside a struct") from None


def _struct(
    data: _Data, position: int, depth: int, spans: dict[int, tuple[int, int]] | None = None
) -> tuple[dict[int, Any], int]:
    if depth > _MAX_DEPTH:
        raise _too_deep()
    fields: dict[int, Any] = {}
    number = 0
    while (header := data[position]) != _STOP:
        start = position
        position += 1
        delta, kind = header >> 4, header & 15
        if delta:
            number += delta
        else:
            number, position = _value(data, position, _INTEGERS[0], depth)
        if kind in _INTEGERS:
            # Most of a footer: read without a further call.
            byte = data[position]
            position += 1
            if byte >= 128:
                byte, position = _rest_of_varint(data, position, byte)
            fields[number] = (byte >> 1) ^ -(byte & 1)
        elif kind == _STRUCT:
            fields[number], position = _struct(data, position, depth + 1)
        elif kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], position = _value(data, position, kind, depth)
        if spans is not None:
            spans[number] = spans.get(number, (start, 0))[0], position
    return fields, position + 1


def _value(data: _Data, position: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return the value at `position`, and the position of its end."""
    if kind in _INTEGERS:
        zigzag, position = _varint(data, position)
        return (zigzag >> 1) ^ -(zigzag & 1), position
    if kind == _BINARY:
        size, position = _varint(data, position)
        return _bytes(data, position, size), position + size
    if kind == _STRUCT:
        return _struct(data, position, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, position, depth)
    if kind in (_BYTE, _TRUE, _FALSE):
        return data[position], position + 1
    if kind == _DOUBLE:
        _bytes(data, position, _DOUBLE_BYTES)
        return None, position + _DOUBLE_BYTES
    if kind == _MAP:
        return None, _end_of_map(data, position, depth)
    raise ThriftError(f"unknown type {kind}")


def _list(data: _Data, position: int, depth: int) -> tuple[list[Any], int]:
    if depth > _MAX_DEPTH:
        raise _too_deep()
    header = data[position]
    position += 1
    size, kind = header >> 4, header & 15
    if size == 15:
        size, position = _varint(data, position)
    if size > len(data) - position:
        raise ThriftError("a list is longer than the data")
    found = []
    for _ in range(size):
        value, position = _value(data, position, kind, depth + 1)
        found.append(value)
    return found, position


def _end_of_map(data: _Data, position: int, depth: int) -> int:
    size, position = _varint(data, position)
    if size > len(data) - position:
        raise ThriftError("a map is longer than the data")
    kinds = 0
    if size:
        kinds = data[position]
        position += 1
    for _ in range(size):
        for kind in (kinds >> 4, kinds & 15):
            _, position = _value(data, position, kind, depth + 1)
    return position


def _bytes(data: _Data, start: int, size: int) -> bytes:
    if size > len(data) - start:
        raise ThriftError("a string is longer than the data")
    return bytes(data[start : start + size])


def _varint(data: _Data, position: int) -> tuple[int, int]:
    byte = data[position]
    return (byte, position + 1) if byte < 128 else _rest_of_varint(data, position + 1, byte)


def _rest_of_varint(data: _Data, position: int, first: int) -> tuple[int, int]:
    value, shift = first & 127, 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 63:
            raise ThriftError("a number has more than 64 bits")


def _too_deep() -> ThriftError:
    return ThriftError(f"a value is nested more than {_MAX_DEPTH} levels deep")
