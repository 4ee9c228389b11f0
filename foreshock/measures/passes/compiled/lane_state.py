"""What a lane of the compiled pass reads and writes: tuples of arrays, which machine code takes apart for nothing."""

from __future__ import annotations

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
    """The columns of TokenInputs as bytes; `formats` [FORMATS] says what they are. One machine code fits all types."""

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
    """Edges between buckets, rising: entry i of a condition's is where bucket i + 1 begins. Those of conditions that
    change with every token are filled up with ∞ to a multiple of eight.
    """

    levels: Float64
    log_probability: Float64
    entropy: Float64
    turn: Float64
    length: Float64
    lag: Float64


class LaneState(NamedTuple):
    """The sums of a lane. `sums`, `ranges` and `rollout_counts` have a row for each rollout of the batch, and lanes
    share them; the rest is the lane's own.
    """

    sums: Float64  # [N, SUMS]
    ranges: Float64  # [N, 2]: least and largest d
    rollout_counts: Int64  # [N, ROLLOUT_COUNTS]
    counts: Int64  # [LANE_COUNTS]
    histogram: Int64  # [2·FINE_SIZE + 1]: the last is for zeros
    cells: Float64  # [2·CELLS, CELL_SUMS]: plain, until they are added to the next two
    cells_high: Float64
    cells_low: Float64
    cell_tokens: Int64  # [2·CELLS]
    cell_largest: Float64  # [2·CELLS]: largest |d|
    token_ids: Float64  # [V, 4]: tokens, then TOKEN_ID_SUMS
    weights: Float64  # [3, 3]
    weight_counts: Int64  # [3]
    largest: Float64  # [2, VALUES_BUFFER]: of d and of −d
    largest_kept: Int64  # [2]
    largest_floor: Float64  # [2]: what a value must exceed to be kept
    largest_difference: Float64  # [1]
    rollout: Float64  # [ROLLOUT_STATE]
    open_turn: Int64  # [1]
    totals: Float64  # [SUMS]: of the chunk at hand
    work: Float64  # [FLOAT_ROWS, CHUNK]
    whole: Int64  # [INTEGER_ROWS, CHUNK]


def lookups() -> Lookups:
    """The edges of the levels and conditions there are."""
    inner = {name: np.array(condition.edges[1:-1]) for name, condition in CONDITIONS.items()}
    return Lookups(
        levels=np.array(TAIL_LEVELS),
        # The probability under μ is looked up by its logarithm.
        log_probability=_filled_up(np.array([math.log(edge) for edge in inner["probability"]])),
        entropy=_filled_up(inner["entropy"]),
        turn=inner["turn"],
        length=inner["length"],
        lag=inner["lag"],
    )


def _filled_up(edges: Float64) -> Float64:
    return np.append(edges, np.full(-edges.size % 8, np.inf))


def new_state(sums: Float64, ranges: Float64, rollout_counts: Int64, token_ids: Float64) -> LaneState:
    """The sums of a lane that has seen nothing; `token_ids` is its table of token ids."""
    return LaneState(
        sums=sums,
        ranges=ranges,
        rollout_counts=rollout_counts,
        counts=np.zeros(layout.LANE_COUNTS, np.int64),
        histogram=np.zeros(2 * layout.FINE_SIZE + 1, np.int64),
        cells=np.zeros((2 * layout.CELLS, layout.CELL_SUMS)),
        cells_high=np.zeros((layout.CELLS, layout.CELL_SUMS)),
        cells_low=np.zeros((layout.CELLS, layout.CELL_SUMS)),
        cell_tokens=np.zeros(2 * layout.CELLS, np.int64),
        cell_largest=np.zeros(2 * layout.CELLS),
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
        whole=np.zeros((layout.INTEGER_ROWS, layout.CHUNK), np.int64),
    )
