"""Read Thrift's compact protocol, the format of Parquet's footers and page headers.

Arrow's own view of a column chunk (`RowGroupMetaData.column`) crashes the process on some damaged footers, and its
sizes are needed before anything is decoded. This reader takes bounded time and depth: a value has at least one byte.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ThriftError", "read_struct"]

_MAX_DEPTH = 24
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)


class ThriftError(ValueError):
    """The bytes are not a struct in the compact protocol."""


def read_struct(data: bytes | memoryview, position: int = 0) -> tuple[dict[int, Any], int]:
    """Return the struct at `position`, as field numbers to values, and the position of its end.

    Values are integers, bytes, lists, booleans or structs; doubles and maps, which no size uses, are None. Raises
    ThriftError if there is no struct.
    """
    reader = _Reader(data, position)
    try:
        return reader.struct(0), reader.position
    except IndexError:
        raise ThriftError("the data ends inside a struct") from None


class _Reader:
    """A position in the bytes; reading beyond their end raises IndexError."""

    def __init__(self, data: bytes | memoryview, position: int) -> None:
        self._data = data
        self.position = position

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _MAX_DEPTH:
            raise ThriftError(f"a value is nested more than {_MAX_DEPTH} levels deep")
        fields: dict[int, Any] = {}
        data, number = self._data, 0
        while (header := data[self.position]) != _STOP:
            self.position += 1
            delta, kind = header >> 4, header & 15
            number = number + delta if delta else self._integer()
            # Integers are most of a footer: read without a further call.
            if kind in _INTEGERS:
                fields[number] = self._integer()
            else:
                fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        self.position += 1
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _INTEGERS:
            return self._integer()
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind in (_BYTE, _TRUE, _FALSE):
            return self._byte()
        if kind == _DOUBLE:
            self._bytes(8)
            return None
        if kind == _MAP:
            return self._map(depth)
        raise ThriftError(f"unknown type {kind}")

    def _list(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise ThriftError(f"a value is nested more than {_MAX_DEPTH} levels deep")
        header = self._byte()
        size, kind = header >> 4, header & 15
        if size == 15:
            size = self._varint()
        if size > len(self._data) - self.position:
            raise ThriftError("a list is longer than the data")
        return [self._value(kind, depth + 1) for _ in range(size)]

    def _map(self, depth: int) -> None:
        size = self._varint()
        if size > len(self._data) - self.position:
            raise ThriftError("a map is longer than the data")
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._value(kinds >> 4, depth + 1)
            self._value(kinds & 15, depth + 1)

    def _byte(self) -> int:
        byte = self._data[self.position]
        self.position += 1
        return byte

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self.position:
            raise ThriftError("a string is longer than the data")
        start = self.position
        self.position += size
        return bytes(self._data[start : self.position])

    def _varint(self) -> int:
        byte = self._data[self.position]
        self.position += 1
        if byte < 128:
            return byte
        value, shift = byte & 127, 7
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ThriftError("a number has more than 64 bits")

    def _integer(self) -> int:
        zigzag = self._varint()
        return (zigzag >> 1) ^ -(zigzag & 1)
