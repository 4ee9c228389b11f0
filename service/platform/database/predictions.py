"""Predict sums of a comparison from the list of its tokens' d: for the packing DERIVED.

Predictions use integers, and additions and multiplications of float64 in a fixed order, whose results IEEE 754 defines:
every machine and every release of numpy predicts the same bits, and the checksum in the header of statistics would tell
if one did not. `exp` is no such function: its last bit differs between libraries. A prediction that is wrong, whatever
the reason, costs bytes and nothing else.

All constants belong to the stored form and never change: other predictions would be another packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.histograms import BitGrid
from foreshock_service.platform.database.planes import Words

__all__ = ["Float64", "Int64", "Place", "Plan", "predictions"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_FINE, _COARSE = BitGrid(lowest=-27, highest=7, bits=6), BitGrid(lowest=-12, highest=7, bits=4)
_CONDITIONS = ("probability", "position", "turn", "length", "entropy", "lag")
_SHAPES: dict[str, tuple[int | None, ...]] = {
    "counts": (12,),
    "sums": (2, 47),
    "extremes": (5,),
    "weights": (3, 3),
    "histogram": (2, _FINE.size),
    "weight_sums": (2, 2, _COARSE.size, 4),
    "token_id_tokens": (None,),
    "token_id_sums": (2, None, 3),
    **{f"{name}_tokens": (None,) for name in _CONDITIONS},
    **{f"{name}_max": (None,) for name in _CONDITIONS},
    **{f"{name}_sums": (2, None, 4) for name in _CONDITIONS},
}
# Of `counts` the measured tokens; of `sums` Σ log π and Σ log μ, and the columns of a bucket: |d|, d, k3 and |π − μ|.
_TOKENS, _LOG_TARGET, _LOG_BEHAVIOUR = 4, 9, 10
_BUCKET_COLUMNS = np.array([1, 0, 3, 13])
_FOUR, _OF_ALL_SUMS = np.arange(4), np.arange(_LOG_TARGET)
# k3 = exp(d) − 1 − d = d²·(1/2! + d/3! + …): nearly all bits for |d| < 0.5, where nearly all tokens are.
_K3_SERIES = tuple(1.0 / math.factorial(power) for power in range(2, 16))


@dataclass(frozen=True, slots=True)
class Place:
    """Where the words of an array are, and its shape."""

    start: int
    shape: tuple[int, ...]

    @property
    def all(self) -> slice:
        """The places of its words."""
        return slice(self.start, self.start + math.prod(self.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Places of words, which follow from the integers of the statistics and the list of d alone.

    `bins` and `cell_of_tokens` are those of |d| of each token. `listed` are those that should be one of d,
    `listed_sizes` one of |d|. `first` and `second` are predicted nearly, in this order; so is the histogram. `single`
    are Σ d of the token ids of one token, `several` of the others, with Σ |d| in the next word; `cells` are Σ(ρ − 1) of
    the bins of |d| that have tokens; `buckets`, of each condition that all tokens have, the sums [B, 4] of those that
    have tokens, most tokens first.
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

    @staticmethod
    def knows(places: Mapping[str, Place]) -> bool:
        """Return whether the arrays are those that the predictions are made for."""
        return all(name in places and _fits(places[name].shape, shape) for name, shape in _SHAPES.items())

    @classmethod
    def of(cls, places: Mapping[str, Place], words: Words, d: Float64) -> Plan:
        """Return the plan for statistics of which the integers are known."""
        tokens_of_ids = words[places["token_id_tokens"].all]
        of_ids = places["token_id_sums"].start + 3 * np.arange(tokens_of_ids.size)
        is_single = tokens_of_ids == 1
        single, several = of_ids[is_single], of_ids[~is_single]
        bins = _FINE.bins(np.abs(d))
        coarse = _COARSE.bins_of(_FINE, bins) + (d > 0) * _COARSE.size
        tokens_of_cells = np.bincount(coarse, minlength=2 * _COARSE.size)
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


def predictions(
    places: Mapping[str, Place], plan: Plan, words: Words, d: Float64
) -> Iterator[tuple[slice | Int64, Words, bool]]:
    """Yield places of words, the bits that are predicted for them, and whether these are near or else equal or wrong.

    One after the other: each prediction uses words that are not predicted, or were before.
    """
    histogram = np.bincount((plan.bins + (d > 0) * _FINE.size)[d != 0], minlength=2 * _FINE.size)
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


def _fits(shape: tuple[int, ...], known: tuple[int | None, ...]) -> bool:
    return len(shape) == len(known) and all(own in (None, size) for size, own in zip(shape, known, strict=True))
