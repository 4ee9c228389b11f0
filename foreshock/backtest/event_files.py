"""TensorBoard event files: the scalars in them, without any other package.

A record is a length (uint64), the length's checksum, the bytes of a protobuf `Event`, and their checksum (TFRecord).
Of an event only the step and the scalar summaries are read: `simple_value` (TensorBoard 1, torch) and tensors of one
number (TensorBoard 2). The last record of a run that was killed may be cut: reading ends there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

MARK = "tfevents"
"""Part of the name of every event file."""

_HEADER = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Field numbers of tensorflow's event.proto, summary.proto and tensor.proto.
_EVENT_STEP, _EVENT_SUMMARY = 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_DTYPE, _TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES = 1, 4, 5, 6
_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
"""DT_FLOAT, DT_DOUBLE, DT_INT32 and DT_INT64."""


def event_files(path: Path) -> list[Path]:
    """Return the event files at or below a path, by name; empty if there are none."""
    if path.is_dir():
        return sorted(each for each in path.rglob(f"*{MARK}*") if each.is_file())
    return [path] if MARK in path.name else []


def scalars_of(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values by tag) of each event that has scalars."""
    for record in _records(path.read_bytes()):
        step, values = 0, dict[str, float]()
        try:
            for number, value in _fields(record):
                if number == _EVENT_STEP and isinstance(value, int):
                    step = value
                elif number == _EVENT_SUMMARY and isinstance(value, bytes):
                    values |= dict(_summary(value))
        except (IndexError, struct.error, UnicodeDecodeError):
            # Not an event: a record that this reader does not know.
            continue
        if values and 0 <= step < 2**62:
            yield step, values


def _records(data: bytes) -> Iterator[bytes]:
    place = 0
    while place + _HEADER.size <= len(data):
        length, _ = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        if place + length + _CHECKSUM_BYTES > len(data):
            return
        yield data[place : place + length]
        place += length + _CHECKSUM_BYTES


def _summary(data: bytes) -> Iterator[tuple[str, float]]:
    for number, value in _fields(data):
        if number != _SUMMARY_VALUE or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, each in _fields(value):
            if inner == _VALUE_TAG and isinstance(each, bytes):
                tag = each.decode()
            elif inner == _VALUE_SIMPLE and isinstance(each, bytes):
                scalar = float(struct.unpack("<f", each)[0])
            elif inner == _VALUE_TENSOR and isinstance(each, bytes):
                scalar = _number(each)
        if tag and scalar is not None:
            yield tag, scalar


def _number(tensor: bytes) -> float | None:
    """Return the number of a tensor of one number, else None."""
    dtype, found = 0, None
    for number, value in _fields(tensor):
        if number == _TENSOR_DTYPE and isinstance(value, int):
            dtype = value
        elif number in (_TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES) and isinstance(value, bytes):
            found = value
    layout = _FORMATS.get(dtype)
    if layout is None or found is None or len(found) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, found)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message; numbers of fixed size as their bytes. Raises IndexError."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == _BYTES:
            length, place = _varint(data, place)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise IndexError(f"unknown wire type {kind}")
        if place + length > len(data):
            raise IndexError("a field is longer than its message")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise IndexError("a number is longer than 64 bits")
