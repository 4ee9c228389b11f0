"""Unpack columns of the database that revisions 0023 to 0039 packed. No release packs them any more.

A mark and a byte identify the packing; data without the mark was stored unchanged.

- DEFLATED: zlib with the dictionary in `packing_dictionary.bin`.
- SPARSE: a blob of statistics (`foreshock/measures/statistics/blob.py`) as its header, a bit for each 8-byte word (set
  if it is not zero), and the words that are not zero; then DEFLATED. MIRRORED: SPARSE, with the array
  `largest_minus_d` left out, since it is `largest_d` reversed and negated.
- PLANED: SPARSE, with the integers and then the other words in planes: the lowest byte of each, then the next one.
- DERIVED: statistics that list the d of every token. Sums that follow from the list are stored as the difference
  between their bits and those of a prediction.

All constants belong to the stored form. A prediction uses integers, and additions and multiplications of float64 in a
fixed order, so that every machine predicts the same bits. If one does not, the checksum in the statistics' header
shows it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["unpack"]

Words = NDArray[np.uint64]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_MARK = b"\xf5\xf7"
_PLAIN, _DEFLATED, _SPARSE, _MIRRORED, _DERIVED, _PLANED = (_MARK + bytes([kind]) for kind in range(6))
_KIND_BYTES = len(_PLAIN)
_HEADER_AT = 8
_SIGN = np.uint64(1 << 63)
_COUNT_BYTES = 3
_INTEGER, _NEAR, _OTHER = range(3)


def unpack(data: bytes) -> bytes:
    """Return the bytes that were packed. Raises zlib.error or ValueError if they are damaged."""
    kind, rest = data[:_KIND_BYTES], data[_KIND_BYTES:]
    if kind == _PLAIN:
        return rest
    if kind not in (_DEFLATED, _SPARSE, _MIRRORED, _DERIVED, _PLANED):
        return data
    inflated = zlib.decompressobj(zdict=_dictionary()).decompress(rest)
    if kind == _DEFLATED:
        return inflated
    end = _HEADER_AT + int.from_bytes(inflated[4:_HEADER_AT], "little")
    header, packed = inflated[_HEADER_AT:end], inflated[end:]
    if kind == _DERIVED:
        words = _restore_words(header, packed)
    elif kind == _PLANED:
        words = _planed_words(header, packed)
    else:
        words = _sparse_words(header, packed, mirrored=kind == _MIRRORED)
    return inflated[:end] + zlib.compress(words.astype("<u8").tobytes(), 1)


@cache
def _dictionary() -> bytes:
    return Path(__file__).with_name("packing_dictionary.bin").read_bytes()


def _planed_words(header: bytes, data: bytes) -> Words:
    arrays = json.loads(header)["arrays"]
    counts = [math.prod(shape) for _, (_, shape) in sorted(arrays.items())]
    is_integer = np.repeat([dtype == "<i8" for _, (dtype, _) in sorted(arrays.items())], counts)
    reader, words = _PlaneReader(data), np.zeros(is_integer.size, np.uint64)
    used = reader.bits(words.size)
    for chosen in (is_integer[used], ~is_integer[used]):
        words[used[chosen]] = reader.words()
    return words


def _sparse_words(header: bytes, data: bytes, *, mirrored: bool) -> Words:
    places = _places_of(json.loads(header)["arrays"])
    words = np.zeros(max(place.all.stop for place in places.values()), np.uint64)
    mask_end = -(-words.size // 8)
    used = np.unpackbits(np.frombuffer(data, np.uint8, mask_end), count=words.size).astype(np.bool_)
    words[used] = np.frombuffer(data, "<u8", offset=mask_end)
    if mirrored:
        words[places["largest_minus_d"].all] = words[places["largest_d"].all][::-1] ^ _SIGN
    return words


def _places_of(arrays: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, _Place]:
    places, position = {}, 0
    for name in sorted(arrays):
        places[name] = _Place(position, tuple(arrays[name][1]))
        position = places[name].all.stop
    return places


def _restore_words(header: bytes, data: bytes) -> Words:
    """Return the words of a DERIVED blob."""
    layout = _layout_of(header.partition(b',"crc32":')[0])
    places, reader = layout.places, _PlaneReader(data)
    d = _read_list(reader)
    words = np.zeros(layout.kinds.size, np.uint64)
    words[places["largest_d"].all] = d.view(np.uint64)
    words[places["largest_minus_d"].all] = d.view(np.uint64)[::-1] ^ _SIGN
    used = reader.bits(words.size)
    words[used[layout.kinds[used] == _INTEGER]] = reader.words()
    plan = _Plan.of(places, words, d)
    found, kinds = reader.words(), layout.kinds_with(plan)[used]
    words[used[kinds == _NEAR]] = reader.words()
    words[used[kinds == _OTHER]] = reader.words()
    _put_listed(words, plan.listed, found[: plan.listed.size], d)
    _put_listed(words, plan.listed_sizes, found[plan.listed.size :], np.abs(d))
    for at, predicted, is_near in _predictions(places, plan, words, d):
        words[at] = _unzigzag(words[at]) + predicted if is_near else words[at] ^ predicted
    return words


class _Layout(NamedTuple):
    """Places of the arrays of a blob, and the kind of each word as far as the arrays tell."""

    places: dict[str, _Place]
    kinds: NDArray[np.uint8]

    def kinds_with(self, plan: _Plan) -> NDArray[np.uint8]:
        """Return the kind of each word."""
        kinds = self.kinds.copy()
        kinds[plan.first] = kinds[plan.second] = _NEAR
        return kinds


@lru_cache(maxsize=256)
def _layout_of(start_of_header: bytes) -> _Layout:
    arrays = json.loads(start_of_header + b"}")["arrays"]
    places = _places_of(arrays)
    kinds = np.full(max(place.all.stop for place in places.values()), _OTHER, np.uint8)
    for name, place in places.items():
        if arrays[name][0] == "<i8":
            kinds[place.all] = _INTEGER
    # The histogram is predicted, so its words are not among the integers, which are read first.
    kinds[places["histogram"].all] = _NEAR
    return _Layout(places, kinds)


def _read_list(reader: _PlaneReader) -> Float64:
    exponent, first = np.frombuffer(reader.take(16), "<i8").tolist()
    differences = reader.words().astype(np.int64)
    steps = first - np.concatenate([np.zeros(1, np.int64), np.cumsum(differences)])
    values: Float64 = np.ldexp(steps.astype(np.float64), exponent)
    return values


def _put_listed(words: Words, at: Int64, found: Words, values: Float64) -> None:
    is_listed = found > 0
    words[at[is_listed]] = values.view(np.uint64)[found[is_listed].astype(np.int64) - 1]


def _unzigzag(words: Words) -> Words:
    return (words >> np.uint64(1)) ^ (np.uint64(0) - (words & np.uint64(1)))


# Bins of |d|: log2 of the bins per power of two, the lowest power, and the number of bins; the highest power is 2^7.
_FINE_BITS, _FINE_LOWEST, _FINE_SIZE = 6, -27, ((7 + 27) << 6) + 2
_COARSE_BITS, _COARSE_LOWEST, _COARSE_SIZE = 4, -12, ((7 + 12) << 4) + 2
_CONDITIONS = ("probability", "position", "turn", "length", "entropy", "lag")
# Places: in `counts` the measured tokens; in `sums` Σ log π, Σ log μ, and a bucket's columns |d|, d, k3 and |π − μ|.
_TOKENS, _LOG_TARGET, _LOG_BEHAVIOUR = 4, 9, 10
_BUCKET_COLUMNS = np.array([1, 0, 3, 13])
_FOUR, _OF_ALL_SUMS = np.arange(4), np.arange(_LOG_TARGET)
# k3 = exp(d) − 1 − d = d²·(1/2! + d/3! + …): nearly all bits are right for |d| < 0.5, where nearly all tokens are.
_K3_SERIES = tuple(1.0 / math.factorial(power) for power in range(2, 16))


class _Place(NamedTuple):
    """The place of an array's words, and its shape."""

    start: int
    shape: tuple[int, ...]

    @property
    def all(self) -> slice:
        """The places of its words."""
        return slice(self.start, self.start + math.prod(self.shape))


class _Plan(NamedTuple):
    """Places of words. They follow from the integers of the statistics and the list of d alone.

    `bins` and `cell_of_tokens` are the fine and the coarse bin of each token's |d|. Words at `listed` should equal one
    of d, at `listed_sizes` one of |d|. `first` and `second`, in this order, and the histogram are predicted nearly.
    `single` has Σ d of the token ids with one token, `several` that of other ids; Σ |d| is in the next word. `cells`
    has Σ(ρ − 1) of the coarse bins with tokens. `buckets` has, for each condition that all tokens have, the sums [B, 4]
    of the buckets with tokens, most tokens first.
    """

    bins: Int64
    cell_of_tokens: Int64
    tokens_of_cells: Int64
    cells: Int64
    single: Int64
    several: Int64
    buckets: tuple[Int64, ...]
    listed: Int64
    listed_sizes: Int64
    first: Int64
    second: Int64

    @classmethod
    def of(cls, places: Mapping[str, _Place], words: Words, d: Float64) -> _Plan:
        """Return the plan for statistics of which the integers are known."""
        tokens_of_ids = words[places["token_id_tokens"].all]
        of_ids = places["token_id_sums"].start + 3 * np.arange(tokens_of_ids.size)
        is_single = tokens_of_ids == 1
        single, several = of_ids[is_single], of_ids[~is_single]
        bins = _fine_bins(np.abs(d))
        coarse = _coarse_bins(bins) + (d > 0) * _COARSE_SIZE
        tokens_of_cells = np.bincount(coarse, minlength=2 * _COARSE_SIZE)
        cells = places["weight_sums"].start + 4 * tokens_of_cells.nonzero()[0]
        tokens = int(words[places["counts"].start + _TOKENS])
        buckets, sizes = [], [np.zeros(0, np.int64)]
        for name in _CONDITIONS:
            of_buckets = words[places[f"{name}_tokens"].all]
            filled = of_buckets.nonzero()[0]
            if filled.size:
                sizes.append(places[f"{name}_max"].start + filled)
                if int(of_buckets.sum()) == tokens:
                    order = filled[(~of_buckets[filled]).argsort(kind="stable")]
                    buckets.append((places[f"{name}_sums"].start + 4 * order)[:, None] + _FOUR)
        sums, weights, extremes = (places[name].start for name in ("sums", "weights", "extremes"))
        of_all = [sums + _OF_ALL_SUMS, extremes + _FOUR[:2], weights + _FOUR[:3]]
        return cls(
            bins, coarse, tokens_of_cells, cells, single, several, tuple(buckets),
            listed=single,
            listed_sizes=np.concatenate(sizes),
            first=np.concatenate([cells, *of_all, single + 1, single + 2]),
            second=np.concatenate([cells + 1, [sums + _LOG_BEHAVIOUR], *(at[0] for at in buckets)]),
        )  # fmt: skip


def _predictions(
    places: Mapping[str, _Place], plan: _Plan, words: Words, d: Float64
) -> Iterator[tuple[slice | Int64, Words, bool]]:
    """Yield places of words, the bits predicted for them, and whether these are near; if not, they are equal or wrong.

    The order matters: each prediction uses words that are not predicted or were restored before.
    """
    histogram = np.bincount((plan.bins + (d > 0) * _FINE_SIZE)[d != 0], minlength=2 * _FINE_SIZE)
    yield places["histogram"].all, histogram.view(np.uint64), True
    with np.errstate(over="ignore", invalid="ignore"):
        signed = np.array([d, -d, d - d[0]])
        k3, of_minus_d, of_scaled = signed * signed * _series(signed)
        above, below, scaled = d + k3, of_minus_d - d, 1.0 + (signed[2] + of_scaled)
        terms = np.array([
            d, np.abs(d), d * d, k3, above, above * above, -(above * below), np.maximum(-above, 0.0),
            np.maximum(above, below), scaled, scaled * scaled,
        ])  # fmt: skip
        # The running sum is defined term by term, unlike `sum`.
        totals = terms.cumsum(axis=1)[:, -1]
        cells, filled = plan.cell_of_tokens, plan.tokens_of_cells.nonzero()[0]
        of_cells: Float64 = np.bincount(cells, above)[filled].astype(np.float64)
        single = words[plan.single].view(np.float64)
        sizes: list[Float64 | Sequence[float]] = [
            totals[:_LOG_TARGET],
            [-d[-1], d[0], d[0]],
            totals[_LOG_TARGET:],
            np.abs(single),
        ]
        yield plan.first, _bits([of_cells, *sizes, single * single * _series(single)]), True

        sums = words[places["sums"].all].view(np.float64)
        above_of_cells = words[plan.cells].view(np.float64)
        squares = np.bincount(cells, terms[5])[filled].astype(np.float64)
        of_cells = np.where(plan.tokens_of_cells[filled] == 1, above_of_cells * above_of_cells, squares)
        rests = []
        for at in plan.buckets:
            rest = sums[_BUCKET_COLUMNS]
            for row in words[at[1:]].view(np.float64):
                rest = rest - row
            rests.append(rest)
        yield plan.second, _bits([of_cells, [sums[_LOG_TARGET] - sums[0]], *rests]), True
    yield plan.several + 1, np.abs(words[plan.several].view(np.float64)).view(np.uint64), False


def _bits(values: Sequence[Float64 | Sequence[float]]) -> Words:
    """Return the bits of the values, one after the other; 0 for NaN, whose bits differ between processors."""
    joined = np.concatenate(values)
    joined[np.isnan(joined)] = 0.0
    return joined.view(np.uint64)


def _series(d: Float64) -> Float64:
    """Return 1/2! + d/3! + d²/4! + … of each value."""
    total = np.full_like(d, _K3_SERIES[-1])
    for coefficient in reversed(_K3_SERIES[:-1]):
        total *= d
        total += coefficient
    return total


def _fine_bins(sizes: Float64) -> Int64:
    raw = np.ascontiguousarray(sizes).view(np.int64) >> (52 - _FINE_BITS)
    bins: Int64 = np.clip(raw - (((1023 + _FINE_LOWEST) << _FINE_BITS) - 1), 0, _FINE_SIZE - 1)
    return bins


def _coarse_bins(fine: Int64) -> Int64:
    first = ((_COARSE_LOWEST - _FINE_LOWEST) << _COARSE_BITS) - 1
    bins: Int64 = np.clip(((fine - 1) >> (_FINE_BITS - _COARSE_BITS)) - first, 0, _COARSE_SIZE - 1)
    return bins


class _PlaneReader:
    """Sequential reader of packed data. Raises ValueError if bytes are missing."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        taken = self._data[self._position : self._position + count]
        if len(taken) < count:
            raise ValueError("the packed words are truncated")
        self._position += count
        return taken

    def bits(self, count: int) -> NDArray[np.int64]:
        """Return which of the next `count` bits are set."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8), count=count))

    def words(self) -> Words:
        """Return the next words, which are stored in planes."""
        count, planes = int.from_bytes(self.take(_COUNT_BYTES), "little"), self.take(1)[0]
        of_words = np.zeros((count, 8), np.uint8)
        of_words[:, :planes] = np.frombuffer(self.take(count * planes), np.uint8).reshape(planes, count).T
        return of_words.view("<u8").ravel().astype(np.uint64)
