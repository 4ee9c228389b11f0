"""Statistics of few tokens without the words that follow from others: for the packing DERIVED.

`largest_d` and `largest_minus_d` of a small step list every token's d. From them follow the histogram and, but for the
last bits, most sums of k3, ρ − 1 and (ρ − 1)². The bits of such a sum minus those of its prediction (`predictions.py`)
are a small integer, which is stored instead; values that are in the list are stored as their places in it.

    exponent of the grid of d, the first d on it | differences of the sorted d | a bit for each word that is not zero
    | integers | places in the list | differences from predictions | other words

All but the first and the bits are in planes (`planes.py`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from foreshock_service.platform.database.planes import PlaneReader, Words, words_in_planes
from foreshock_service.platform.database.predictions import Float64, Int64, Place, Plan, predictions

__all__ = ["AFTER_ARRAYS", "derive_words", "restore_words"]

_SIGN = np.uint64(1 << 63)
_MOST_LISTED = 1024
# |d| beyond which its powers could overflow.
_LARGEST_D = 64.0
_INTEGER, _NEAR, _OTHER = range(3)
AFTER_ARRAYS = b',"crc32":'
"""Where the part of a header ends that describes the arrays; its keys are sorted."""


def derive_words(header: bytes, words: Words) -> bytes | None:
    """Return the words of a blob of statistics in the stored form; None if they are not statistics of few tokens.

    Raises ValueError, TypeError or LookupError if `header` is not that of a blob.
    """
    layout = _layout_of(header.partition(AFTER_ARRAYS)[0])
    if layout is None or words.size != layout.kinds.size:
        return None
    places = layout.places
    falling, rising = words[places["largest_d"].all], words[places["largest_minus_d"].all]
    if not np.array_equal(falling[::-1] ^ _SIGN, rising):
        return None
    d = falling.view(np.float64)
    coded = _coded_list(d)
    if coded is None:
        return None
    plan = Plan.of(places, words, d)
    stored = words.copy()
    for at, predicted, is_near in predictions(places, plan, words, d):
        stored[at] = _zigzag(words[at] - predicted) if is_near else words[at] ^ predicted
    found = np.concatenate([_find(words[plan.listed], d), _find(words[plan.listed_sizes], np.abs(d))])
    stored[np.concatenate([plan.listed, plan.listed_sizes])[found.nonzero()[0]]] = 0
    stored[places["largest_d"].all] = stored[places["largest_minus_d"].all] = 0
    used = stored != 0
    at = used.nonzero()[0]
    kinds, left = layout.kinds_with(plan)[at], stored[at]
    parts = left[kinds == _INTEGER], found, left[kinds == _NEAR], left[kinds == _OTHER]
    return coded + np.packbits(used).tobytes() + b"".join(map(words_in_planes, parts))


def restore_words(header: bytes, data: bytes) -> Words:
    """Return the words of `derive_words`. Raises ValueError if the bytes are damaged."""
    layout = _layout_of(header.partition(AFTER_ARRAYS)[0])
    if layout is None:
        raise ValueError("the header does not describe statistics of few tokens")
    places, reader = layout.places, PlaneReader(data)
    d = _read_list(reader)
    words = np.zeros(layout.kinds.size, np.uint64)
    words[places["largest_d"].all] = d.view(np.uint64)
    words[places["largest_minus_d"].all] = d.view(np.uint64)[::-1] ^ _SIGN
    used = reader.bits(words.size)
    words[used[layout.kinds[used] == _INTEGER]] = reader.words()
    plan = Plan.of(places, words, d)
    found, kinds = reader.words(), layout.kinds_with(plan)[used]
    words[used[kinds == _NEAR]] = reader.words()
    words[used[kinds == _OTHER]] = reader.words()
    _put_listed(words, plan.listed, found[: plan.listed.size], d)
    _put_listed(words, plan.listed_sizes, found[plan.listed.size :], np.abs(d))
    for at, predicted, is_near in predictions(places, plan, words, d):
        words[at] = _unzigzag(words[at]) + predicted if is_near else words[at] ^ predicted
    return words


@dataclass(frozen=True, slots=True)
class _Layout:
    """Places of the arrays of a blob, and the kind of each word as far as the arrays tell."""

    places: dict[str, Place]
    kinds: NDArray[np.uint8]

    def kinds_with(self, plan: Plan) -> NDArray[np.uint8]:
        """Return the kind of each word."""
        kinds = self.kinds.copy()
        kinds[plan.first] = kinds[plan.second] = _NEAR
        return kinds


@lru_cache(maxsize=256)
def _layout_of(start_of_header: bytes) -> _Layout | None:
    """Return the layout; None if the arrays are not those that predictions are made for."""
    arrays = json.loads(start_of_header + b"}")["arrays"]
    places, position = {}, 0
    for name in sorted(arrays):
        places[name] = Place(position, tuple(arrays[name][1]))
        position = places[name].all.stop
    if not Plan.knows(places) or not {"largest_d", "largest_minus_d"} <= set(places):
        return None
    if places["largest_d"].shape != places["largest_minus_d"].shape:
        return None
    if not 0 < math.prod(places["largest_d"].shape) <= _MOST_LISTED:
        return None
    kinds = np.full(position, _OTHER, np.uint8)
    for name, place in places.items():
        if arrays[name][0] == "<i8":
            kinds[place.all] = _INTEGER
    # Predicted, so that its words are not among the integers, which are read first.
    kinds[places["histogram"].all] = _NEAR
    return _Layout(places, kinds)


def _coded_list(d: Float64) -> bytes | None:
    """Return the falling values as integers on the coarsest grid that has them all; None if none of int64 has."""
    if not (np.abs(d) <= _LARGEST_D).all():
        return None
    fractions, exponents = np.frexp(d)
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    lowest = np.frexp((mantissas & -mantissas).astype(np.float64))[1]
    used = mantissas != 0
    exponent = int((exponents + lowest)[used].min(initial=60)) - 54
    on_grid = np.ldexp(d, -exponent)
    if np.abs(on_grid).max() >= 2.0**53:
        return None
    steps = on_grid.astype(np.int64)
    # False for −0.0 as well.
    if not np.array_equal(np.ldexp(steps.astype(np.float64), exponent).view(np.uint64), d.view(np.uint64)):
        return None
    differences = steps[:-1] - steps[1:]
    if (differences < 0).any():
        return None
    start = np.array([exponent, steps[0]], "<i8").tobytes()
    return start + words_in_planes(differences.view(np.uint64))


def _read_list(reader: PlaneReader) -> Float64:
    exponent, first = np.frombuffer(reader.take(16), "<i8").tolist()
    differences = reader.words().astype(np.int64)
    steps = first - np.concatenate([np.zeros(1, np.int64), np.cumsum(differences)])
    values: Float64 = np.ldexp(steps.astype(np.float64), exponent)
    return values


def _find(words: Words, values: Float64) -> Words:
    """Return 1 + the place of each word's bits among the bits of the values; 0 for one that is not there."""
    bits = values.view(np.uint64)
    order = bits.argsort(kind="stable")
    places = order[np.minimum(bits[order].searchsorted(words), order.size - 1)]
    found: Words = ((places + 1) * (bits[places] == words)).astype(np.uint64)
    return found


def _put_listed(words: Words, at: Int64, found: Words, values: Float64) -> None:
    is_listed = found > 0
    words[at[is_listed]] = values.view(np.uint64)[found[is_listed].astype(np.int64) - 1]


def _zigzag(differences: Words) -> Words:
    """Return small numbers for small differences of either sign."""
    signed = differences.view(np.int64)
    return ((signed << 1) ^ (signed >> 63)).view(np.uint64)


def _unzigzag(words: Words) -> Words:
    return (words >> np.uint64(1)) ^ (np.uint64(0) - (words & np.uint64(1)))
