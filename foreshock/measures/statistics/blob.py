"""Statistics as bytes: a canonical JSON header and raw little-endian arrays, compressed; no executable content.

4 bytes "FSST" | 4 bytes header length | header | zlib of all arrays, one after the other

The header is {"kind", "statistics_version", "arrays": {name: [dtype, shape]}, "crc32"}. A reader names the arrays that
it expects; any other array or version is refused.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.digests import canonical_json
from foreshock.errors import StatisticsError
from foreshock.parsing import parse_json

# Increase this if the meaning of a stored number changes; blobs of two versions never mix.
STATISTICS_VERSION = 6

# zlib's level; fixed, so that equal arrays give equal bytes.
_COMPRESSION_LEVEL = 1
_MAGIC = b"FSST"
_MAX_HEADER_BYTES = 1 << 20
_MAX_ARRAY_BYTES = 256 << 20


def pack(kind: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return `arrays` (int64, uint64 or float64) as one blob; equal arrays give equal bytes under one zlib version."""
    names = sorted(arrays)
    payload = b"".join([np.asarray(arrays[name], arrays[name].dtype.newbyteorder("<")).tobytes() for name in names])
    header = canonical_json(
        {
            "kind": kind,
            "statistics_version": STATISTICS_VERSION,
            "arrays": {name: [arrays[name].dtype.newbyteorder("<").str, list(arrays[name].shape)] for name in names},
            "crc32": zlib.crc32(payload),
        }
    ).encode()
    return _MAGIC + len(header).to_bytes(4, "little") + header + zlib.compress(payload, _COMPRESSION_LEVEL)


def unpack(kind: str, data: bytes, expected: Mapping[str, tuple[str, tuple[int | None, ...]]]) -> dict[str, Any]:
    """Return the arrays of a blob of this kind; `expected` maps each name to its dtype and shape (None: any length).

    Raises StatisticsError if the blob is of another kind or version, is damaged, or does not match `expected`.
    """
    header, start = read_header(data, _MAGIC, "blob", _MAX_HEADER_BYTES)
    if header.get("kind") != kind:
        raise StatisticsError(f"the blob must hold {kind!r}, got {header.get('kind')!r}")
    version = header.get("statistics_version")
    if version != STATISTICS_VERSION:
        raise StatisticsError(
            f"statistics must be of version {STATISTICS_VERSION}, got {version!r}: "
            "measure them again from their tokens (`foreshock remeasure`)"
        )
    layout = header.get("arrays")
    if not isinstance(layout, dict) or set(layout) != set(expected):
        raise StatisticsError("the blob is damaged: its arrays are not those of its version")
    sizes = {name: _checked_shape(name, layout[name], *expected[name]) for name in sorted(expected)}
    total = sum(8 * math.prod(shape) for shape in sizes.values())
    if total > _MAX_ARRAY_BYTES:
        raise StatisticsError(f"the arrays of a blob must be at most {_MAX_ARRAY_BYTES:,} bytes, got {total:,}")
    payload = _decompress(data[start:], total)
    if zlib.crc32(payload) != header.get("crc32"):
        raise StatisticsError("the blob is damaged: its checksum does not match")
    arrays, position = {}, 0
    for name, shape in sizes.items():
        count = math.prod(shape)
        raw = np.frombuffer(payload, dtype=expected[name][0], count=count, offset=position)
        arrays[name] = raw.reshape(shape).astype(raw.dtype.newbyteorder("="))
        position += 8 * count
    return arrays


def read_header(data: bytes, magic: bytes, noun: str, largest: int) -> tuple[dict[str, Any], int]:
    """Return the JSON header of a `noun`, of at most `largest` bytes, and the position after it.

    4 bytes `magic` | 4 bytes length, little-endian | header. Raises StatisticsError.
    """
    if len(data) < 8 or data[:4] != magic:
        raise StatisticsError(f"the bytes are not a {noun} of statistics")
    length = int.from_bytes(data[4:8], "little")
    if length > largest or 8 + length > len(data):
        raise StatisticsError(f"the {noun} is damaged: its header is truncated")
    try:
        header = parse_json(data[8 : 8 + length])
    except ValueError as error:
        raise StatisticsError(f"the {noun} is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise StatisticsError(f"the {noun} is damaged: its header is not an object")
    return header, 8 + length


def _checked_shape(name: str, given: object, dtype: str, shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the shape in the header, which must equal `shape`; None in `shape` allows any length."""
    if not isinstance(given, list) or len(given) != 2 or given[0] != dtype or not isinstance(given[1], list):
        raise StatisticsError(f"the blob is damaged: `{name}` must be {dtype}, got {given!r}")
    sizes = given[1]
    fits = len(sizes) == len(shape) and all(
        type(size) is int and size >= 0 and (expected is None or size == expected)
        for size, expected in zip(sizes, shape, strict=True)
    )
    if not fits:
        raise StatisticsError(f"the blob is damaged: `{name}` must have the shape {shape}, got {sizes}")
    return tuple(sizes)


def _decompress(data: bytes, size: int) -> bytes:
    """Return exactly `size` bytes, and never hold more than that in memory."""
    decompressor = zlib.decompressobj()
    try:
        payload = decompressor.decompress(data, size + 1)
    except zlib.error as error:
        raise StatisticsError("the blob is damaged: it cannot be decompressed") from error
    if len(payload) != size or not decompressor.eof or decompressor.unused_data:
        raise StatisticsError("the blob is damaged: its size differs from its header")
    return payload
