"""Sums of importance weights of tokens and of turns, which may exceed the range of a float64: see `LogWeights`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.bucket_runs import all_equal, sum_of_run
from foreshock.measures.passes.compiled.chunk_sums import sums_of_weights
from foreshock.measures.passes.compiled.jit import compiled
from foreshock.measures.passes.compiled.lane_state import LaneState

__all__ = ["add_turns", "add_weights", "close_turn"]


@compiled
def add_scaled(weights: NDArray[np.float64], row: int, largest: float, total: float, squares: float) -> None:
    """Add weights with the sum total·e^largest and the sum of squares squares·e^(2·largest)."""
    known = weights[row, layout.LARGEST]
    if largest <= known:
        scale = math.exp(largest - known)
        weights[row, layout.SCALED_SUM] += total * scale
        weights[row, layout.SCALED_SQUARES] += squares * scale * scale
        return
    scale = math.exp(known - largest)
    weights[row, layout.LARGEST] = largest
    weights[row, layout.SCALED_SUM] = weights[row, layout.SCALED_SUM] * scale + total
    weights[row, layout.SCALED_SQUARES] = weights[row, layout.SCALED_SQUARES] * scale * scale + squares


@compiled
def add_weights(state: LaneState, n: int, most: float) -> None:
    """Add the weights ρ of n tokens; `most` is their largest d."""
    weights = state.weights
    if abs(most) < layout.PLAIN_LIMIT:
        total, squares = sums_of_weights(state.work, n)
        row = layout.PLAIN_TOKENS
        weights[row, layout.LARGEST] = max(weights[row, layout.LARGEST], most)
        weights[row, layout.SCALED_SUM] += total
        weights[row, layout.SCALED_SQUARES] += squares
        state.weight_counts[row] += n
        return
    total, squares = 0.0, 0.0
    for i in range(n):
        scaled = math.exp(state.work[layout.D, i] - most)
        total += scaled
        squares += scaled * scaled
    add_scaled(weights, layout.SCALED_TOKENS, most, total, squares)
    state.weight_counts[layout.SCALED_TOKENS] += n


@compiled
def close_turn(state: LaneState) -> None:
    """Add the weight of the open turn: the product of the ratios of its tokens."""
    add_scaled(state.weights, layout.SCALED_TURNS, state.rollout[layout.TURN_D], 1.0, 1.0)
    state.weight_counts[layout.SCALED_TURNS] += 1


@compiled
def add_turns(state: LaneState, row: int, n: int, before: int) -> None:
    """Add n tokens to the turns of their rollout; a turn ends when its number changes.

    `before` is the number of measured tokens of the rollout in earlier chunks.
    """
    turns = state.integers[layout.TURN]
    begin, constant = 0, all_equal(state.integers, layout.TURN, n)
    while begin < n:
        end = n if constant else begin + 1
        while end < n and turns[end] == turns[begin]:
            end += 1
        if before + begin == 0 or turns[begin] != state.open_turn[0]:
            if before + begin > 0:
                close_turn(state)
            state.open_turn[0] = turns[begin]
            state.rollout[layout.TURN_D] = 0.0
            state.rollout_counts[row, layout.TURNS] += 1
        state.rollout[layout.TURN_D] += sum_of_run(state.work, layout.D, begin, end)
        begin = end
