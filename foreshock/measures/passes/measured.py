"""The measured tokens of a batch, and the sums over them that both passes compute alike."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import RolloutSums
from foreshock.measures.statistics.tails import ABOVE, BELOW, LARGEST_VALUES, merge_largest
from foreshock.rollouts.arrays import offsets_of_lengths, row_counts, row_ranges

# Tokens of a chunk, so that its arrays stay in a core's cache: 32k float64 are 256 KiB.
CHUNK_TOKENS = 1 << 15


def measured_tokens(inputs: TokenInputs) -> tuple[TokenInputs, NDArray[np.int64] | None, RolloutSums]:
    """Return the columns of the tokens that are generated and have two finite log-probs, with one advantage each.

    Besides them: the positions [T] of these tokens in their rollouts, None if every token is measured, and new sums
    with the numbers of generated, measured and non-finite tokens.
    """
    offsets, size = inputs.offsets, int(inputs.offsets[-1])
    result, positions = RolloutSums.empty(offsets.size - 1), None
    finite_target, finite_behaviour = np.isfinite(inputs.target), np.isfinite(inputs.behaviour)
    keep = finite_target & finite_behaviour
    generated = np.ones(size, np.bool_) if inputs.generated is None else inputs.generated
    result.nonfinite_target = int(np.count_nonzero(generated & ~finite_target))
    result.nonfinite_behaviour = int(np.count_nonzero(generated & ~finite_behaviour))
    keep &= generated
    result.generated, result.tokens = row_counts(generated, offsets), row_counts(keep, offsets)
    advantage = inputs.advantage
    if advantage is not None and advantage.size != size:
        advantage = np.repeat(advantage, np.diff(offsets))
    kept: slice | NDArray[np.int64] = slice(None)
    if not keep.all():
        kept = np.flatnonzero(keep)
        positions, offsets = kept - np.repeat(offsets[:-1], result.tokens), offsets_of_lengths(result.tokens)

    def column(values: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values is None else values[kept]

    measured = TokenInputs(
        inputs.target[kept],
        inputs.behaviour[kept],
        offsets,
        entropy=column(inputs.entropy),
        turn=column(inputs.turn),
        lag=column(inputs.lag),
        token_ids=column(inputs.token_ids),
        advantage=column(advantage),
    )
    return measured, positions, result


def add_largest_and_turns(result: RolloutSums, measured: TokenInputs) -> None:
    """Add the largest d and −d, which the histogram of `result` helps to find, and the weights of the turns."""
    above, below = _floor(result.histogram[ABOVE]), -_floor(result.histogram[BELOW])
    large, small, weights = [], [], []
    for first, last in row_ranges(measured.offsets, CHUNK_TOKENS):
        cuts = measured.offsets[first : last + 1]
        cut = slice(int(cuts[0]), int(cuts[-1]))
        d = np.subtract(measured.target[cut], measured.behaviour[cut], dtype=np.float64)
        large.append(d[d >= above])
        small.append(d[d <= below])
        if measured.turn is not None and d.size:
            turn = measured.turn[cut]
            changes = np.flatnonzero(turn[1:] != turn[:-1]) + 1
            begins = np.union1d(changes, cuts[:-1][result.tokens[first:last] > 0] - cuts[0])
            rows = first + np.searchsorted(cuts[1:] - cuts[0], begins, side="right")
            result.turns += np.bincount(rows, minlength=result.turns.size)
            # The weight of a turn is the product of the ratios of its tokens.
            weights.append(np.add.reduceat(d, begins)[result.whole()[rows]])
    none = np.zeros(0)
    result.largest_d = merge_largest(none, np.concatenate([none, *large]), LARGEST_VALUES)
    result.largest_minus_d = merge_largest(none, -np.concatenate([none, *small]), LARGEST_VALUES)
    result.turn_weights = LogWeights.of(np.concatenate([none, *weights]))


def _floor(counts: NDArray[np.int64]) -> float:
    """Return a bound below the largest values of a side, whose positive values the histogram counts; −∞ if too few."""
    reached = counts.size - 1 - int(np.searchsorted(np.cumsum(counts[::-1]), LARGEST_VALUES))
    return LOG_RATIO_GRID.lower_edge(reached) if reached >= 0 else -math.inf
