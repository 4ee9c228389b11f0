"""The token pass in numpy: the reference for every sum.

Each sum over a chunk is exact to a few units in the 20th digit of the largest term, and chunks are added with
compensation. The result therefore does not depend on chunks or shards, even if the terms cancel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators import token
from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.chunks import Chunk, sum_chunks
from foreshock.measures.statistics.bucket_sums import BUCKET_SUMS, BucketSums
from foreshock.measures.statistics.compensated_sums import (
    CompensatedSums,
    summable_parts,
    sums_by_bucket,
    sums_by_run,
)
from foreshock.measures.statistics.conditions import CONDITIONS, position_buckets, probability_buckets
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.tails import ABOVE, TAIL_LEVELS, TAIL_SUMS, sums_beyond
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS, TokenIdTotals

__all__ = ["sum_rollouts_numpy"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Terms = dict[str, Float64]


def sum_rollouts_numpy(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout, and of all of them together."""
    return sum_chunks(inputs, _NumpyTotals(inputs.token_ids))


class _NumpyTotals:
    """Sums over all chunks that are kept with compensation."""

    def __init__(self, token_ids: NDArray[np.integer] | None) -> None:
        self.token_ids = TokenIdTotals.for_ids(token_ids)
        self.tail_sums = CompensatedSums.zeros(2, len(TAIL_LEVELS), len(TAIL_SUMS))
        self.weight_sums = CompensatedSums.zeros(2, WEIGHT_GRID.size, len(TAIL_SUMS))

    def add(self, result: RolloutSums, chunk: Chunk) -> None:
        terms = _token_terms(chunk)
        _add_rollouts(result, chunk, terms)
        result.max_probability_difference = max(
            result.max_probability_difference, float(terms["abs_probability_difference"].max())
        )
        self._add_grids(result, chunk, terms)
        for name, buckets in _buckets_by_condition(chunk, terms):
            result.conditions[name] = result.conditions[name].merge(buckets)
        if chunk.token_ids is not None:
            self.token_ids.add(chunk.token_ids, [terms[name] for name in TOKEN_ID_SUMS])

    def finish(self, result: RolloutSums) -> None:
        result.tail_sums = self.tail_sums.value
        result.weight_sums = self.weight_sums.value
        result.token_ids = self.token_ids.sums()

    def _add_grids(self, result: RolloutSums, chunk: Chunk, terms: Terms) -> None:
        """Add the histograms of |d| and the tails, by the sign of d."""
        d, distance = terms["d"], terms["abs_d"]
        side = (d > 0).astype(np.int64)
        fine = LOG_RATIO_GRID.bins(distance)
        counts = np.bincount(fine + side * LOG_RATIO_GRID.size, minlength=2 * LOG_RATIO_GRID.size).reshape(2, -1)
        # Zeros are counted separately; on the grid they would all be in the bin of the smallest differences.
        zeros = d.size - int(np.count_nonzero(d))
        counts[0, 0] -= zeros
        result.zero_tokens += zeros
        result.histogram += counts
        of_tails = _tail_terms(chunk, terms)
        bins = WEIGHT_GRID.bins_of(LOG_RATIO_GRID, fine) + side * WEIGHT_GRID.size
        self.weight_sums += _sums_by_side(bins, of_tails, WEIGHT_GRID.size)
        far = np.flatnonzero(distance > TAIL_LEVELS[0])
        if far.size:
            # The number of levels that a token exceeds, less one.
            beyond = np.searchsorted(np.array(TAIL_LEVELS), distance[far], side="left") - 1
            buckets = beyond + np.where(d[far] > 0, ABOVE * len(TAIL_LEVELS), 0)
            between = np.bincount(buckets, minlength=2 * len(TAIL_LEVELS)).reshape(2, -1)
            result.tail_counts += np.cumsum(between[:, ::-1], axis=1)[:, ::-1]
            of_far = [None if term is None else term[far] for term in of_tails]
            self.tail_sums += sums_beyond(_sums_by_side(buckets, of_far, len(TAIL_LEVELS)))


def _token_terms(chunk: Chunk) -> Terms:
    """Return by name the terms of TOKEN_SUMS that depend on one token's log-probs alone."""
    d = chunk.d
    above, below = token.ratio_minus_one(d), token.ratio_minus_one(-d)
    target_probability, behaviour_probability = np.exp(chunk.target), np.exp(chunk.behaviour)
    return {
        "d": d,
        "abs_d": np.abs(d),
        "d2": np.square(d),
        "k3_kl": token.k3_kl(d, above),
        "ratio_minus_one": above,
        "chi2_token": token.chi2_token(d, above),
        "reverse_chi2_token": token.reverse_chi2_token(d, above, below),
        "tv_token": token.tv_token(d, above),
        # exp|d| − 1: the sum keeps its digits near agreement.
        "prob_error_minus_one": np.maximum(above, below),
        "log_target": chunk.target,
        "log_behaviour": chunk.behaviour,
        "target_probability": target_probability,
        "behaviour_probability": behaviour_probability,
        # |π − μ| = max(π, μ)·(1 − exp(−|d|)), without cancellation.
        "abs_probability_difference": np.maximum(target_probability, behaviour_probability) * -np.minimum(above, below),
    }


def _add_rollouts(result: RolloutSums, chunk: Chunk, terms: Terms) -> None:
    """Fill the sums of each rollout, and the second moments of probabilities about its own mean."""

    def put(name: str, values: Float64) -> None:
        result.sums[chunk.rows, TOKEN_SUMS.index(name)] = chunk.sum(values)

    for name, values in terms.items():
        put(name, values)
    lengths = np.diff(chunk.offsets)
    target, behaviour, difference = (
        terms[name] - chunk.spread(result.column(name)[chunk.rows] / lengths)
        for name in ("target_probability", "behaviour_probability", "abs_probability_difference")
    )
    put("within_target", target * target)
    put("within_behaviour", behaviour * behaviour)
    put("within_product", target * behaviour)
    put("within_difference", difference * difference)
    if chunk.entropy is not None:
        known = np.isfinite(chunk.entropy)
        put("entropy", np.where(known, chunk.entropy, 0.0))
        put("surprisal", np.where(known, -chunk.behaviour - chunk.entropy, 0.0))
    if chunk.advantage is not None:
        known = np.isfinite(chunk.advantage)
        value = np.where(known, chunk.advantage, 0.0)
        put("advantage", value)
        put("advantage2", value * value)
        put("advantage_d", value * terms["d"])
        put("d_with_advantage", np.where(known, terms["d"], 0.0))
        skew = _without_nan(value, terms["ratio_minus_one"])
        put("positive_advantage_skew", np.where(value > 0, skew, 0.0))
        put("negative_advantage_skew", np.where(value < 0, skew, 0.0))


def _without_nan(advantage: Float64, above: Float64) -> Float64:
    """Return A·(ρ − 1), 0 if A is 0 and ρ infinite."""
    return np.multiply(advantage, above, where=advantage != 0, out=np.zeros_like(above))


def _tail_terms(chunk: Chunk, terms: Terms) -> list[Float64 | None]:
    """Return the terms of TAIL_SUMS; None for a term that is 0 everywhere."""
    above, chi2 = terms["ratio_minus_one"], terms["chi2_token"]
    if chunk.advantage is None:
        return [above, chi2, None, None]
    advantage = np.where(np.isfinite(chunk.advantage), chunk.advantage, 0.0)
    return [above, chi2, advantage, _without_nan(advantage, above)]


def _sums_by_side(buckets: Int64, terms: list[Float64 | None], size: int) -> CompensatedSums:
    """Return the sums of K terms over the tokens of each bucket of both sides, [2, size, K]."""
    nothing = np.zeros(2 * size), np.zeros(2 * size)
    sums = CompensatedSums.of_columns(
        nothing if term is None else sums_by_bucket(buckets, summable_parts(term), 2 * size) for term in terms
    )
    return CompensatedSums(sums.high.reshape(2, size, -1), sums.low.reshape(2, size, -1))


def _buckets_by_condition(chunk: Chunk, terms: Terms) -> Iterator[tuple[str, BucketSums]]:
    """Yield the chunk's bucket sums for each known condition but the length."""
    distance = terms["abs_d"]
    parts = [summable_parts(terms[name]) for name in BUCKET_SUMS]
    size = CONDITIONS["probability"].size
    yield "probability", BucketSums.of(size, probability_buckets(chunk.behaviour), parts, distance)
    if chunk.entropy is not None:
        known = np.isfinite(chunk.entropy)
        condition = CONDITIONS["entropy"]
        of_known = [(high[known], low[known]) for high, low in parts]
        yield (
            "entropy",
            BucketSums.of(condition.size, condition.buckets(chunk.entropy[known]), of_known, distance[known]),
        )
    # Positions, turns and lags rarely change between tokens: sums over runs, then over buckets.
    for name, values in (("position", position_buckets(chunk.positions)), ("turn", chunk.turn), ("lag", chunk.lag)):
        if values is None:
            continue
        starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        sums = [sums_by_run(starts, part) for part in parts]
        buckets = values[starts].astype(np.int64) if name == "position" else CONDITIONS[name].buckets(values[starts])
        largest, tokens = np.maximum.reduceat(distance, starts), np.diff(starts, append=values.size)
        yield name, BucketSums.of(CONDITIONS[name].size, buckets, sums, largest, tokens)
