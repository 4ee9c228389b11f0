"""The sums of the numpy pass over all tokens together: histograms, tails, conditions, token ids, largest values.

Each sum over a chunk is exact to a few units in the 20th digit of the largest term, and chunks are added with
compensation. The result therefore does not depend on chunks or shards, even if the terms cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.bucket_sums import BUCKET_SUMS, BucketSums
from foreshock.measures.statistics.compensated_sums import (
    CompensatedSums,
    Parts,
    summable_parts,
    sums_by_bucket,
    sums_by_run,
)
from foreshock.measures.statistics.conditions import CONDITIONS, position_buckets, probability_buckets
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import RolloutSums
from foreshock.measures.statistics.tails import ABOVE, LARGEST_VALUES, TAIL_LEVELS, TAIL_SUMS, merge_largest
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS, TokenIdTotals

__all__ = ["ChunkTokens", "NumpyTotals"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTokens:
    """The measured tokens of some rollouts: `terms` by name and the other columns, all [T]; `offsets` cut them.

    `lengths` are the generated tokens of each rollout; `advantage` is NaN if there is none.
    """

    terms: dict[str, Float64]
    offsets: Int64
    behaviour: NDArray[np.floating]
    positions: Int64
    lengths: Int64
    entropy: NDArray[np.floating] | None
    turn: NDArray[np.integer] | None
    lag: NDArray[np.integer] | None
    token_ids: NDArray[np.integer] | None
    advantage: Float64 | None


@dataclass(slots=True, eq=False)
class NumpyTotals:
    """Sums that `finish` writes into a RolloutSums."""

    token_ids: TokenIdTotals
    tail_sums: CompensatedSums = field(
        default_factory=lambda: CompensatedSums.zeros(2, len(TAIL_LEVELS), len(TAIL_SUMS))
    )
    weight_sums: CompensatedSums = field(
        default_factory=lambda: CompensatedSums.zeros(2, WEIGHT_GRID.size, len(TAIL_SUMS))
    )

    def add(self, result: RolloutSums, chunk: ChunkTokens) -> None:
        """Add the tokens of a chunk: exactly mergeable values to `result`, sums here."""
        d = chunk.terms["d"]
        result.token_weights = result.token_weights.merge(LogWeights.of(d))
        result.max_probability_difference = max(
            result.max_probability_difference, float(chunk.terms["abs_probability_difference"].max())
        )
        result.largest_d = merge_largest(result.largest_d, d, LARGEST_VALUES)
        result.largest_minus_d = merge_largest(result.largest_minus_d, -d, LARGEST_VALUES)
        self._add_grids(result, chunk)
        for name, buckets in _buckets_by_condition(chunk):
            result.conditions[name] = result.conditions[name].merge(buckets)
        if chunk.token_ids is not None:
            self.token_ids.add(chunk.token_ids, [chunk.terms[name] for name in TOKEN_ID_SUMS])

    def finish(self, result: RolloutSums) -> None:
        """Write the sums into `result`."""
        result.tail_sums = self.tail_sums.value
        result.weight_sums = self.weight_sums.value
        result.token_ids = self.token_ids.sums()

    def _add_grids(self, result: RolloutSums, chunk: ChunkTokens) -> None:
        """Add the histograms of |d| and the tails, by the sign of d."""
        d, distance = chunk.terms["d"], chunk.terms["abs_d"]
        side = (d > 0).astype(np.int64)
        fine = LOG_RATIO_GRID.bins(distance)
        counts = np.bincount(fine + side * LOG_RATIO_GRID.size, minlength=2 * LOG_RATIO_GRID.size).reshape(2, -1)
        # Zeros are counted separately; on the grid they would all be in the bin of the smallest differences.
        zeros = d.size - int(np.count_nonzero(d))
        counts[0, 0] -= zeros
        result.zero_tokens += zeros
        result.histogram += counts
        terms = _tail_terms(chunk)
        bins = WEIGHT_GRID.bins_of(LOG_RATIO_GRID, fine) + side * WEIGHT_GRID.size
        self.weight_sums += _sums_by_side(bins, terms, WEIGHT_GRID.size)
        far = np.flatnonzero(distance > TAIL_LEVELS[0])
        if far.size:
            # The number of levels that a token exceeds, less one.
            beyond = np.searchsorted(np.array(TAIL_LEVELS), distance[far], side="left") - 1
            buckets = beyond + np.where(d[far] > 0, ABOVE * len(TAIL_LEVELS), 0)
            between = np.bincount(buckets, minlength=2 * len(TAIL_LEVELS)).reshape(2, -1)
            result.tail_counts += np.cumsum(between[:, ::-1], axis=1)[:, ::-1]
            of_terms = [None if term is None else term[far] for term in terms]
            self.tail_sums += _beyond(_sums_by_side(buckets, of_terms, len(TAIL_LEVELS)))


def _tail_terms(chunk: ChunkTokens) -> list[Float64 | None]:
    """Return the terms of TAIL_SUMS; None for a term that is 0 everywhere."""
    above, chi2 = chunk.terms["ratio_minus_one"], chunk.terms["chi2_token"]
    if chunk.advantage is None:
        return [above, chi2, None, None]
    advantage = np.where(np.isfinite(chunk.advantage), chunk.advantage, 0.0)
    # `where` avoids ∞·0 for an infinite ρ and an advantage of 0.
    product = np.multiply(advantage, above, where=advantage != 0, out=np.zeros_like(above))
    return [above, chi2, advantage, product]


def _beyond(between: CompensatedSums) -> CompensatedSums:
    """Return the sums beyond each level, [2, levels, K], from those between two levels."""
    total = CompensatedSums.zeros(2, len(TAIL_LEVELS), len(TAIL_SUMS))
    running = CompensatedSums.zeros(2, len(TAIL_SUMS))
    for level in reversed(range(len(TAIL_LEVELS))):
        running = running + CompensatedSums(between.high[:, level], between.low[:, level])
        total.high[:, level], total.low[:, level] = running.high, running.low
    return total


def _sums_by_side(buckets: Int64, terms: list[Float64 | None], size: int) -> CompensatedSums:
    """Return the sums of K terms over the tokens of each bucket of both sides, [2, size, K]."""
    nothing = np.zeros(2 * size), np.zeros(2 * size)
    sums = CompensatedSums.of_columns(
        nothing if term is None else sums_by_bucket(buckets, summable_parts(term), 2 * size) for term in terms
    )
    return CompensatedSums(sums.high.reshape(2, size, -1), sums.low.reshape(2, size, -1))


def _buckets_by_condition(chunk: ChunkTokens) -> Iterator[tuple[str, BucketSums]]:
    """Yield the chunk's bucket sums for each known condition."""
    distance = chunk.terms["abs_d"]
    parts = [summable_parts(chunk.terms[name]) for name in BUCKET_SUMS]
    size = CONDITIONS["probability"].size
    yield "probability", BucketSums.of(size, probability_buckets(chunk.behaviour), parts, distance)
    if chunk.entropy is not None:
        known = np.isfinite(chunk.entropy)
        kept = slice(None) if known.all() else known
        condition = CONDITIONS["entropy"]
        of_kept = [(high[kept], low[kept]) for high, low in parts]
        yield "entropy", BucketSums.of(condition.size, condition.buckets(chunk.entropy[kept]), of_kept, distance[kept])
    yield from _buckets_of_runs(chunk, parts)


def _buckets_of_runs(chunk: ChunkTokens, parts: list[Parts]) -> Iterator[tuple[str, BucketSums]]:
    """Yield the bucket sums of conditions that rarely change between tokens: sums over runs, then over buckets."""
    places = position_buckets(chunk.positions)
    known = {"turn": chunk.turn, "lag": chunk.lag}
    of_tokens = {name: values for name, values in known.items() if values is not None}
    begins = np.zeros(places.size, np.bool_)
    begins[chunk.offsets[:-1]] = True
    for values in (places, *of_tokens.values()):
        begins[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(begins)
    tokens = np.diff(starts, append=places.size)
    sums = [sums_by_run(starts, part) for part in parts]
    largest = np.maximum.reduceat(chunk.terms["abs_d"], starts)
    rows = np.searchsorted(chunk.offsets, starts, side="right") - 1
    of_runs = {name: CONDITIONS[name].buckets(values[starts]) for name, values in of_tokens.items()}
    of_runs["length"] = CONDITIONS["length"].buckets(chunk.lengths[rows])
    of_runs["position"] = places[starts]
    for name, buckets in of_runs.items():
        yield name, BucketSums.of(CONDITIONS[name].size, buckets, sums, largest, tokens)
