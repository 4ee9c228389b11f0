"""The measured tokens of a batch, a cache-sized chunk of rollouts at a time, and the sums that both passes share.

A pass adds each chunk to its `TokenTotals`: `numpy_pass.py` is the reference, `compiled.py` the fast one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.statistics.bucket_sums import BUCKET_SUMS, BucketSums
from foreshock.measures.statistics.compensated_sums import summable_parts
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, RolloutSums
from foreshock.measures.statistics.tails import LARGEST_VALUES, merge_largest
from foreshock.rollouts.arrays import offsets_of_lengths

__all__ = ["CHUNK_TOKENS", "Chunk", "TokenTotals", "chunks_of", "sum_chunks"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# Tokens of a chunk, so that its arrays stay in a core's cache: 32k float64 are 256 KiB.
CHUNK_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The measured tokens of some rollouts, all [T]; `offsets` cut them, `rows` are the rollouts' places in the batch.

    `d` is log π − log μ. Entropies and advantages that a token lacks are NaN; None means that none were logged.
    """

    rows: Int64
    offsets: Int64
    target: Float64
    behaviour: Float64
    d: Float64
    positions: Int64
    entropy: Float64 | None
    turn: NDArray[np.integer] | None
    lag: NDArray[np.integer] | None
    token_ids: NDArray[np.integer] | None
    advantage: Float64 | None

    def sum(self, values: Float64) -> Float64:
        """Return the sum over each rollout."""
        return np.add.reduceat(values, self.offsets[:-1])

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the value of each token's rollout."""
        return np.repeat(values, np.diff(self.offsets))


class TokenTotals(Protocol):
    """The sums of one pass: everything of RolloutSums that `sum_chunks` does not fill itself."""

    def add(self, result: RolloutSums, chunk: Chunk) -> None:
        """Add a chunk: the sums of its rollouts to `result`, others there or here."""

    def finish(self, result: RolloutSums) -> None:
        """Write the sums over all chunks into `result`."""


def sum_chunks(inputs: TokenInputs, totals: TokenTotals) -> RolloutSums:
    """Return the sums of each rollout, and of all of them together."""
    result = RolloutSums.empty(inputs.offsets.size - 1)
    # Values that are not log-probs, such as a logit of 1000, give infinity or NaN silently, as in machine code.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for chunk in chunks_of(inputs, result):
            _add_extremes(result, chunk)
            _add_counts(result, chunk)
            totals.add(result, chunk)
        totals.finish(result)
        result.conditions["length"] = _sums_by_length(result)
    return result


def chunks_of(inputs: TokenInputs, result: RolloutSums) -> Iterator[Chunk]:
    """Yield the measured tokens of the batch; fill the numbers of generated, measured and non-finite ones."""
    for first, last in _row_ranges(inputs.offsets):
        start, stop = int(inputs.offsets[first]), int(inputs.offsets[last])
        offsets = inputs.offsets[first : last + 1] - start
        target, behaviour = inputs.target[start:stop], inputs.behaviour[start:stop]
        finite_target, finite_behaviour = np.isfinite(target), np.isfinite(behaviour)
        keep = finite_target & finite_behaviour
        generated = np.ones(stop - start, np.bool_) if inputs.generated is None else inputs.generated[start:stop]
        result.nonfinite_target += int(np.count_nonzero(generated & ~finite_target))
        result.nonfinite_behaviour += int(np.count_nonzero(generated & ~finite_behaviour))
        keep &= generated
        result.generated[first:last] = _counts(generated, offsets)
        result.tokens[first:last] = lengths = _counts(keep, offsets)
        if lengths.any():
            yield _chunk(inputs, offsets, first, slice(None) if keep.all() else keep, lengths)


def _row_ranges(offsets: Int64) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about CHUNK_TOKENS tokens each; a longer rollout is a chunk of its own."""
    first, rows = 0, offsets.size - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + CHUNK_TOKENS, side="right")) - 1
        last = max(min(last, rows), first + 1)
        yield first, last
        first = last


def _chunk(inputs: TokenInputs, offsets: Int64, first: int, kept: slice | NDArray[np.bool_], lengths: Int64) -> Chunk:
    """Return the kept tokens of the rows that begin at `first`; `offsets` cut all of their tokens."""
    start = int(inputs.offsets[first])
    cut = slice(start, start + int(offsets[-1]))
    filled = np.flatnonzero(lengths)

    def column(values: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values is None else values[cut][kept]

    def floats(values: NDArray[Any] | None) -> Float64 | None:
        return None if values is None else values[cut][kept].astype(np.float64)

    if inputs.advantage is None or inputs.advantage.size == inputs.offsets[-1]:
        advantage = floats(inputs.advantage)
    else:
        advantage = np.repeat(inputs.advantage[filled + first].astype(np.float64), lengths[filled])
    target, behaviour = inputs.target[cut][kept].astype(np.float64), inputs.behaviour[cut][kept].astype(np.float64)
    return Chunk(
        rows=filled + first,
        offsets=offsets_of_lengths(lengths[filled]),
        target=target,
        behaviour=behaviour,
        d=target - behaviour,
        positions=(np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], np.diff(offsets)))[kept],
        entropy=floats(inputs.entropy),
        turn=column(inputs.turn),
        lag=column(inputs.lag),
        token_ids=column(inputs.token_ids),
        advantage=advantage,
    )


def _counts(flags: NDArray[np.bool_], offsets: Int64) -> Int64:
    """Return the number of flags that are set in each rollout."""
    if flags.all():
        return np.diff(offsets)
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags, dtype=np.int64)])
    return np.diff(running[offsets])


def _add_extremes(result: RolloutSums, chunk: Chunk) -> None:
    """Add the ranges, the largest values and the importance weights of d, of tokens and of turns."""
    d, starts = chunk.d, chunk.offsets[:-1]
    result.min_d[chunk.rows] = np.minimum.reduceat(d, starts)
    result.max_d[chunk.rows] = np.maximum.reduceat(d, starts)
    result.largest_d = merge_largest(result.largest_d, d, LARGEST_VALUES)
    result.largest_minus_d = merge_largest(result.largest_minus_d, -d, LARGEST_VALUES)
    result.token_weights = result.token_weights.merge(LogWeights.of(d))
    if chunk.turn is not None:
        begins = np.zeros(d.size, np.bool_)
        begins[starts] = True
        begins[1:] |= chunk.turn[1:] != chunk.turn[:-1]
        result.turns[chunk.rows] = _counts(begins, chunk.offsets)
        # The weight of a turn is the product of the ratios of its tokens.
        weights = np.add.reduceat(d, np.flatnonzero(begins))
        result.turn_weights = result.turn_weights.merge(LogWeights.of(weights))


def _add_counts(result: RolloutSums, chunk: Chunk) -> None:
    """Count the tokens with an entropy, those with an advantage, and DPPO's bad updates."""
    if chunk.entropy is not None:
        result.entropy_tokens[chunk.rows] = _counts(np.isfinite(chunk.entropy), chunk.offsets)
    if chunk.advantage is None:
        return
    known = np.isfinite(chunk.advantage)
    result.advantage_tokens[chunk.rows] = _counts(known, chunk.offsets)
    # μ − π ≥ gap needs μ ≥ gap; the margin is for rounding.
    likely = chunk.behaviour > math.log(DPPO_PROBABILITY_GAP) - 1e-9
    places = np.flatnonzero(known & (chunk.advantage < 0) & (chunk.d < 0) & likely)
    lost = np.exp(chunk.behaviour[places]) * -np.expm1(chunk.d[places])
    result.bad_updates += int(np.count_nonzero(lost >= DPPO_PROBABILITY_GAP))


def _sums_by_length(result: RolloutSums) -> BucketSums:
    """Return the bucket sums by the number of generated tokens, which all tokens of a rollout share."""
    rows = np.flatnonzero(result.tokens)
    condition = CONDITIONS["length"]
    return BucketSums.of(
        condition.size,
        condition.buckets(result.generated[rows]),
        [summable_parts(result.column(name)[rows]) for name in BUCKET_SUMS],
        np.maximum(np.abs(result.min_d[rows]), np.abs(result.max_d[rows])),
        result.tokens[rows],
    )
