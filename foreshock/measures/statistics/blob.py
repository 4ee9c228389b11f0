"""Statistics as bytes: a canonical JSON header and raw little-endian arrays, compressed; nothing in it can run.

    4 bytes "FSST" | 4 bytes header length | header | zlib of all arrays, one after the other

The header is {"kind", "statistics_version", "arrays": {name: [dtype, shape]}, "crc32"}. A reader says which arrays it
expects; anything else, and any other version, is refused.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.digests import canonical_json
from foreshock.errors import StatisticsError

__all__ = ["STATISTICS_VERSION", "pack", "unpack"]

# Raise it whenever a stored number changes its meaning: blobs of two versions never mix.
STATISTICS_VERSION = 2

_MAGIC = b"FSST"
_MAX_HEADER_BYTES = 1 << 20
_MAX_ARRAY_BYTES = 256 << 20


def pack(kind: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """`arrays` (int64, uint64 or float64) as one blob; equal arrays give equal bytes under one zlib."""
    shapes: dict[str, Any] = {}
    parts = []
    for name in sorted(arrays):
        little = np.ascontiguousarray(arrays[name]).astype(arrays[name].dtype.newbyteorder("<"), copy=False)
        shapes[name] = [little.dtype.str, list(arrays[name].shape)]
        parts.append(little.tobytes())
    payload = b"".join(parts)
    header = canonical_json(
        {"kind": kind, "statistics_version": STATISTICS_VERSION, "arrays": shapes, "crc32": zlib.crc32(payload)}
    ).encode()
    return _MAGIC + len(header).to_bytes(4, "little") + header + zlib.compress(payload, 1)


def unpack(kind: str, data: bytes, expected: Mapping[str, tuple[str, tuple[int | None, ...]]]) -> dict[str, Any]:
    """The arrays of a blob of this kind; `expected` maps each name to its dtype and shape (None: any length).

    Raises StatisticsError where the blob is of another kind or version, is damaged, or is not as expected.
    """
    header, start = _header(data)
    if header.get("kind") != kind:
        raise StatisticsError(f"this blob holds {header.get('kind')!r} and not {kind!r}")
    version = header.get("statistics_version")
    if version != STATISTICS_VERSION:
        raise StatisticsError(
            f"these statistics are of version {version!r} and this release reads {STATISTICS_VERSION}: "
            "measure them again from their tokens (`foreshock remeasure`)"
        )
    layout = header.get("arrays")
    if not isinstance(layout, dict) or set(layout) != set(expected):
        raise StatisticsError("this blob does not hold the arrays of its version: it is damaged")
    sizes = {name: _checked_shape(name, layout[name], *expected[name]) for name in sorted(expected)}
    total = sum(8 * math.prod(shape) for shape in sizes.values())
    if total > _MAX_ARRAY_BYTES:
        raise StatisticsError(f"this blob says it holds {total:,} bytes, more than {_MAX_ARRAY_BYTES:,}")
    payload = _decompress(data[start:], total)
    if zlib.crc32(payload) != header.get("crc32"):
        raise StatisticsError("this blob is damaged: its checksum does not match")
    arrays, position = {}, 0
    for name, shape in sizes.items():
        count = math.prod(shape)
        raw = np.frombuffer(payload, dtype=expected[name][0], count=count, offset=position)
        arrays[name] = raw.reshape(shape).astype(raw.dtype.newbyteorder("="))
        position += 8 * count
    return arrays


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    if len(data) < 8 or data[:4] != _MAGIC:
        raise StatisticsError("this is not a blob of statistics")
    length = int.from_bytes(data[4:8], "little")
    if length > _MAX_HEADER_BYTES or 8 + length > len(data):
        raise StatisticsError("this blob is damaged: its header is cut off")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise StatisticsError("this blob is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise StatisticsError("this blob is damaged: its header is not an object")
    return header, 8 + length


def _checked_shape(name: str, given: object, dtype: str, shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """The shape in the header, which must be `shape` with some length wherever that says None."""
    if not isinstance(given, list) or len(given) != 2 or given[0] != dtype or not isinstance(given[1], list):
        raise StatisticsError(f"this blob is damaged: `{name}` is not {dtype}")
    sizes = given[1]
    fits = len(sizes) == len(shape) and all(
        type(size) is int and size >= 0 and (wanted is None or size == wanted)
        for size, wanted in zip(sizes, shape, strict=True)
    )
    if not fits:
        raise StatisticsError(f"this blob is damaged: `{name}` has the shape {sizes} and not {shape}")
    return tuple(sizes)


def _decompress(data: bytes, size: int) -> bytes:
    """Exactly `size` bytes, and never more than that in memory."""
    decompressor = zlib.decompressobj()
    try:
        payload = decompressor.decompress(data, size + 1)
    except zlib.error as error:
        raise StatisticsError("this blob is damaged: it cannot be decompressed") from error
    if len(payload) != size or not decompressor.eof or decompressor.unused_data:
        raise StatisticsError("this blob is damaged: it does not hold as much as its header says")
    return payload
