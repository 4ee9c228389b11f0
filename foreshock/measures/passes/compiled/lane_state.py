"""The arrays that a lane reads and writes, as named tuples, which machine code unpacks at no cost."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.tails import TAIL_LEVELS

__all__ = ["LaneColumns", "LaneState", "Lookups", "lookups", "new_state"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class LaneColumns(NamedTuple):
    """The columns of TokenInputs as bytes, with `formats` [FORMATS] as their item sizes.

    One machine code serves all types.
    """

    offsets: Int64
    formats: Int64
    target: Bytes
    behaviour: Bytes
    generated: Bytes
    entropy: Bytes
    advantage: Bytes
    turn: Bytes
    lag: Bytes
    token_ids: Bytes


class Lookups(NamedTuple):
    """Bucket edges, rising: entry i of a condition is the lower edge of bucket i + 1.

    Edges of conditions that change with every token are padded with ∞ to a multiple of eight.
    """

    levels: Float64
    log_probability: Float64
    entropy: Float64
    turn: Float64
    length: Float64
    lag: Float64


class LaneState(NamedTuple):
    """The sums of a lane.

    `sums`, `ranges` and `rollout_counts` have a row per rollout of the batch and are shared by all lanes.
    """

    sums: Float64  # [N, SUMS]
    ranges: Float64  # [N, 2]: smallest and largest d
    rollout_counts: Int64  # [N, ROLLOUT_COUNTS]
    counts: Int64  # [LANE_COUNTS]
    histogram: Int64  # [2·FINE_SIZE + 1]: the last is for zeros
    bucket_sums: Float64  # [2·BUCKETS, SUMS_PER_BUCKET]: plain sums, flushed to the next two
    bucket_sums_high: Float64
    bucket_sums_low: Float64
    bucket_tokens: Int64  # [2·BUCKETS]
    bucket_max_abs_d: Float64  # [2·BUCKETS]: largest |d|
    token_ids: Float64  # [V, 4]: tokens, then TOKEN_ID_SUMS
    weights: Float64  # [3, 3]
    weight_counts: Int64  # [3]
    largest: Float64  # [2, VALUES_BUFFER]: of d and of −d
    largest_kept: Int64  # [2]
    largest_floor: Float64  # [2]: the value to exceed to be kept
    largest_difference: Float64  # [1]
    rollout: Float64  # [ROLLOUT_STATE]
    open_turn: Int64  # [1]
    totals: Float64  # [SUMS]: of the current chunk
    work: Float64  # [FLOAT_ROWS, CHUNK]
    integers: Int64  # [INTEGER_ROWS, CHUNK]


@functools.cache
def lookups() -> Lookups:
    """Return the edges of the tail levels and of all conditions, which the lanes only read."""
    inner = {name: np.array(condition.edges[1:-1]) for name, condition in CONDITIONS.items()}
    return Lookups(
        levels=np.array(TAIL_LEVELS),
        # Edges of log μ, which the lanes have at hand.
        log_probability=_padded(np.array([math.log(edge) for edge in inner["probability"]])),
        entropy=_padded(inner["entropy"]),
        turn=inner["turn"],
        length=inner["length"],
        lag=inner["lag"],
    )


def _padded(edges: Float64) -> Float64:
    """Return the edges padded with ∞ to a multiple of eight."""
    return np.append(edges, np.full(-edges.size % 8, np.inf))


def new_state(sums: Float64, ranges: Float64, rollout_counts: Int64, token_ids: Float64) -> LaneState:
    """Return the state of an empty lane; `token_ids` is its table by token id."""
    return LaneState(
        sums=sums,
        ranges=ranges,
        rollout_counts=rollout_counts,
        counts=np.zeros(layout.LANE_COUNTS, np.int64),
        histogram=np.zeros(2 * layout.FINE_SIZE + 1, np.int64),
        bucket_sums=np.zeros((2 * layout.BUCKETS, layout.SUMS_PER_BUCKET)),
        bucket_sums_high=np.zeros((layout.BUCKETS, layout.SUMS_PER_BUCKET)),
        bucket_sums_low=np.zeros((layout.BUCKETS, layout.SUMS_PER_BUCKET)),
        bucket_tokens=np.zeros(2 * layout.BUCKETS, np.int64),
        bucket_max_abs_d=np.zeros(2 * layout.BUCKETS),
        token_ids=token_ids,
        weights=np.array([[-math.inf, 0.0, 0.0]] * 3),
        weight_counts=np.zeros(3, np.int64),
        largest=np.zeros((2, layout.VALUES_BUFFER)),
        largest_kept=np.zeros(2, np.int64),
        largest_floor=np.full(2, -math.inf),
        largest_difference=np.zeros(1),
        rollout=np.zeros(layout.ROLLOUT_STATE),
        open_turn=np.zeros(1, np.int64),
        totals=np.zeros(layout.SUMS),
        work=np.zeros((layout.FLOAT_ROWS, layout.CHUNK)),
        integers=np.zeros((layout.INTEGER_ROWS, layout.CHUNK), np.int64),
    )
