"""Blobs and documents packed for the database: a small step would take 40 kB otherwise, most of it the same every time.

Five packings, told by a mark and a byte; the bytes that are read are those that were stored.

- DEFLATED: zlib with a preset dictionary, which holds what is in every step: the headers of statistics, the schema of
  rollout summaries, the lint's report of a clean step.
- SPARSE: a blob of statistics (`foreshock/measures/statistics/blob.py`): its header, a bit for each 8-byte word that is
  not zero, and those words; then zlib with the dictionary. Nine in ten words of a small step are zero.
- MIRRORED: SPARSE, where the sorted negative differences are those of the sorted differences: every token is listed.
- PLANED: SPARSE, with the integers and then the other words in planes (`planes.py`); the evidence of the lint.
- DERIVED: statistics that list every token, without the words that follow from the list (`derived_words.py`).

What no packing makes smaller is stored as it is, as are the blobs of older releases, which begin with other bytes. The
dictionary file never changes: a better one would be another packing.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.blob import COMPRESSION_LEVEL, Blob
from foreshock_service.platform.database.derived_words import AFTER_ARRAYS, derive_words, restore_words
from foreshock_service.platform.database.planes import PlaneReader, Words, words_in_planes

# No text begins so, and no blob of an older release.
_MARK = b"\xf5\xf7"
_PLAIN, _DEFLATED, _SPARSE, _MIRRORED, _DERIVED, _PLANED = (_MARK + bytes([kind]) for kind in range(6))
_KIND_BYTES = len(_PLAIN)
_STATISTICS = b"FSST"
_HEADER_AT = 8
_SIGN = np.uint64(1 << 63)
_LEVEL = 6
# Raised for a blob whose header does not describe its words.
_NOT_PACKED = (zlib.error, ValueError, TypeError, LookupError, OverflowError)


@dataclass(frozen=True, slots=True)
class Packed:
    """Bytes that are packed outside the writer; `bytes(…)` gives them."""

    packed: bytes

    @classmethod
    def of(cls, data: bytes | Blob) -> Packed:
        """Pack the bytes now; a blob of statistics need not be compressed before."""
        return cls(_packed_blob(data) if isinstance(data, Blob) else pack(data))

    def __bytes__(self) -> bytes:
        return unpack(self.packed)


def _packed_blob(blob: Blob) -> bytes:
    """Return `pack(blob.to_bytes())`, without a comparison with the blob's size: its header alone is larger."""
    try:
        return _packed_words(blob.head, np.frombuffer(blob.payload, "<u8").astype(np.uint64))
    except _NOT_PACKED:
        return pack(blob.to_bytes())


def pack(data: bytes) -> bytes:
    """Return the bytes in the smallest packing that applies."""
    smallest = _packed_statistics(data) if data.startswith(_STATISTICS) else None
    if smallest is None:
        smallest = _DEFLATED + _deflate(data)
    if len(smallest) < len(data):
        return smallest
    return _PLAIN + data if data.startswith(_MARK) else data


def unpack(data: bytes) -> bytes:
    """Return the bytes of `pack`. Raises zlib.error or ValueError if they are damaged."""
    kind, rest = data[:_KIND_BYTES], data[_KIND_BYTES:]
    if kind == _PLAIN:
        return rest
    if kind == _DEFLATED:
        return _inflate(rest)
    if kind == _DERIVED:
        return _unpacked_derived(_inflate(rest))
    if kind == _PLANED:
        return _unpacked_planed(_inflate(rest))
    if kind in (_SPARSE, _MIRRORED):
        return _unpacked_statistics(_inflate(rest), mirrored=kind == _MIRRORED)
    return data


def _packed_statistics(data: bytes) -> bytes | None:
    """Return the packing of a blob of statistics; None if it is not one of this release's."""
    try:
        end, _, words = _opened(data)
        # Only what is read back with the same bytes.
        if data[end:] != zlib.compress(words.tobytes(), COMPRESSION_LEVEL):
            return None
        return _packed_words(data[:end], words)
    except _NOT_PACKED:
        return None


def _packed_words(start: bytes, words: Words) -> bytes:
    """Return the packing of a blob of statistics, of which `start` is all but the words; raises one of _NOT_PACKED."""
    header = start[_HEADER_AT:]
    derived = derive_words(header, words)
    if derived is not None:
        return _DERIVED + _deflate(start + derived)
    if b'"largest_d"' in header:
        return _sparse(start, words)
    return _PLANED + _deflate(_planed(start, words))


def pack_as_sparse(data: bytes) -> bytes:
    """Return a blob of statistics as releases before PLANED and DERIVED read it (migration 0028)."""
    end, _, words = _opened(data)
    return _sparse(data[:end], words)


def is_newer_than_sparse(packed: bytes) -> bool:
    """Return whether releases before PLANED and DERIVED cannot read this."""
    return packed[:_KIND_BYTES] in (_PLANED, _DERIVED)


def _opened(data: bytes) -> tuple[int, bytes, Words]:
    """Return where the arrays of a blob of statistics begin, its header, and its words."""
    end = _HEADER_AT + int.from_bytes(data[4:_HEADER_AT], "little")
    return end, data[_HEADER_AT:end], np.frombuffer(zlib.decompress(data[end:]), "<u8").astype(np.uint64)


def _sparse(start: bytes, words: Words) -> bytes:
    """Return a blob, of which `start` is all but the words, as SPARSE or MIRRORED."""
    mirror, kind = _mirror(start[_HEADER_AT:], words), _SPARSE
    if mirror is not None:
        own, other = mirror
        left = words[other] ^ words[own][::-1] ^ _SIGN
        if not left.any():
            words[other], kind = 0, _MIRRORED
    used = words != 0
    return kind + _deflate(start + np.packbits(used).tobytes() + words[used].astype("<u8").tobytes())


def _planed(start: bytes, words: Words) -> bytes:
    is_integer, used = _integers(start[_HEADER_AT:], words.size), words != 0
    parts = (words[used & is_integer], words[used & ~is_integer])
    return start + np.packbits(used).tobytes() + b"".join(map(words_in_planes, parts))


def _unpacked_planed(data: bytes) -> bytes:
    end = _HEADER_AT + int.from_bytes(data[4:_HEADER_AT], "little")
    size = sum(math.prod(shape) for _, shape in json.loads(data[_HEADER_AT:end])["arrays"].values())
    is_integer, reader, words = _integers(data[_HEADER_AT:end], size), PlaneReader(data[end:]), np.zeros(size, "<u8")
    used = reader.bits(size)
    for chosen in (is_integer[used], ~is_integer[used]):
        words[used[chosen]] = reader.words()
    return data[:end] + zlib.compress(words.tobytes(), COMPRESSION_LEVEL)


def _integers(header: bytes, size: int) -> NDArray[np.bool_]:
    """Return which words are of arrays of integers. Raises ValueError if the arrays have another size."""
    found = _integers_of(header.partition(AFTER_ARRAYS)[0])
    if found.size != size:
        raise ValueError("the header does not describe the arrays")
    return found


# The arrays of most steps of a run have the same sizes.
@lru_cache(maxsize=64)
def _integers_of(start_of_header: bytes) -> NDArray[np.bool_]:
    arrays = json.loads(start_of_header + b"}")["arrays"]
    counts = [math.prod(shape) for _, (_, shape) in sorted(arrays.items())]
    found = np.repeat([dtype == "<i8" for _, (dtype, _) in sorted(arrays.items())], counts)
    found.flags.writeable = False
    return found


def _unpacked_derived(data: bytes) -> bytes:
    end = _HEADER_AT + int.from_bytes(data[4:_HEADER_AT], "little")
    words = restore_words(data[_HEADER_AT:end], data[end:])
    return data[:end] + zlib.compress(words.astype("<u8").tobytes(), COMPRESSION_LEVEL)


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
    return data[:end] + zlib.compress(words.tobytes(), COMPRESSION_LEVEL)


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
