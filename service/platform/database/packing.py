"""Blobs and documents packed for the database: a small step would take 40 kB otherwise, most of it the same every time.

Three packings, told by a mark and a byte; the bytes that are read are those that were stored.

- DEFLATED: zlib with a preset dictionary, which holds what is in every step: the headers of statistics, the schema of
  rollout summaries, the lint's report of a clean step.
- SPARSE: a blob of statistics (`foreshock/measures/statistics/blob.py`): its header, a bit for each 8-byte word that is
  not zero, and those words; then zlib with the dictionary. Nine in ten words of a small step are zero.
- MIRRORED: SPARSE, where the sorted negative differences are those of the sorted differences: every token is listed.

What no packing makes smaller is stored as it is, as are the blobs of older releases, which begin with other bytes. The
dictionary file never changes: a better one would be another packing.
"""

from __future__ import annotations

import json
import math
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# No text begins so, and no blob of an older release.
_MARK = b"\xf5\xf7"
_PLAIN, _DEFLATED, _SPARSE, _MIRRORED = (_MARK + bytes([kind]) for kind in range(4))
_KIND_BYTES = len(_PLAIN)
_STATISTICS = b"FSST"
_HEADER_AT = 8
_SIGN = np.uint64(1 << 63)
_LEVEL = 6
# What `blob.pack` compresses with, so that unpacked statistics have the bytes that they were stored with.
_BLOB_LEVEL = 1

Words = NDArray[np.uint64]


class Packed(bytes):
    """Bytes with their packing, made outside the writer."""

    packed: bytes

    @classmethod
    def of(cls, data: bytes) -> Packed:
        """Pack the bytes now."""
        made = cls(data)
        made.packed = pack(data)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_packing, (bytes(self), self.packed)


def _with_packing(data: bytes, packed: bytes) -> Packed:
    made = Packed(data)
    made.packed = packed
    return made


def pack(data: bytes) -> bytes:
    """Return the bytes in the smallest packing that applies."""
    smallest = _packed_statistics(data) if data.startswith(_STATISTICS) else None
    if smallest is None:
        smallest = _DEFLATED + _deflate(data)
    if len(smallest) < len(data):
        return smallest
    return _PLAIN + data if data.startswith(_MARK) else data


def unpack(data: bytes) -> bytes:
    """Return the bytes of `pack`. Raises zlib.error if they are damaged."""
    kind, rest = data[:_KIND_BYTES], data[_KIND_BYTES:]
    if kind == _PLAIN:
        return rest
    if kind == _DEFLATED:
        return _inflate(rest)
    if kind in (_SPARSE, _MIRRORED):
        return _unpacked_statistics(_inflate(rest), mirrored=kind == _MIRRORED)
    return data


def _packed_statistics(data: bytes) -> bytes | None:
    """Return the packing of a blob of statistics; None if it is not one of this release's."""
    try:
        end = _HEADER_AT + int.from_bytes(data[4:_HEADER_AT], "little")
        words = np.frombuffer(zlib.decompress(data[end:]), "<u8").copy()
        mirror = _mirror(data[_HEADER_AT:end], words)
    except (zlib.error, ValueError, TypeError, LookupError):
        return None
    # Only what is read back with the same bytes.
    if data[end:] != zlib.compress(words.tobytes(), _BLOB_LEVEL):
        return None
    kind = _SPARSE
    if mirror is not None:
        own, other = mirror
        left = words[other] ^ words[own][::-1] ^ _SIGN
        if not left.any():
            words[other], kind = 0, _MIRRORED
    used = words != 0
    return kind + _deflate(data[:end] + np.packbits(used).tobytes() + words[used].tobytes())


def _unpacked_statistics(data: bytes, *, mirrored: bool) -> bytes:
    end = _HEADER_AT + int.from_bytes(data[4:_HEADER_AT], "little")
    size = sum(math.prod(shape) for _, shape in json.loads(data[_HEADER_AT:end])["arrays"].values())
    mask_end = end + -(-size // 8)
    used = np.unpackbits(np.frombuffer(data, np.uint8, mask_end - end, end), count=size).astype(np.bool_)
    words = np.zeros(size, "<u8")
    words[used] = np.frombuffer(data, "<u8", offset=mask_end)
    mirror = _mirror(data[_HEADER_AT:end], words) if mirrored else None
    if mirror is not None:
        own, other = mirror
        words[other] = words[own][::-1] ^ _SIGN
    return data[:end] + zlib.compress(words.tobytes(), _BLOB_LEVEL)


def _mirror(header: bytes, words: Words) -> tuple[slice, slice] | None:
    """Return the places of the sorted differences and of the negative ones; None if their numbers differ."""
    places, position = {}, 0
    arrays = json.loads(header)["arrays"]
    for name in sorted(arrays):
        size = math.prod(arrays[name][1])
        places[name] = slice(position, position + size)
        position += size
    if position != words.size:
        raise ValueError("the header does not describe the arrays")
    if "largest_d" not in places or arrays["largest_d"][1] != arrays["largest_minus_d"][1]:
        return None
    return places["largest_d"], places["largest_minus_d"]


def _deflate(data: bytes) -> bytes:
    # A copy: to read the dictionary takes longer than to compress a small blob.
    compressor = _compressor().copy()
    return compressor.compress(data) + compressor.flush()


def _inflate(data: bytes) -> bytes:
    return zlib.decompressobj(zdict=_dictionary()).decompress(data)


@cache
def _compressor() -> zlib._Compress:
    return zlib.compressobj(_LEVEL, zdict=_dictionary())


@cache
def _dictionary() -> bytes:
    return Path(__file__).with_name("packing_dictionary.bin").read_bytes()
