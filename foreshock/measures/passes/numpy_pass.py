"""The token pass in numpy: the reference for every sum.

It processes a cache-sized chunk of rollouts at a time. This module computes the sums of each rollout; `numpy_totals.py`
adds the sums over all tokens together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators import token
from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.numpy_totals import ChunkTokens, NumpyTotals
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.token_ids import TokenIdTotals
from foreshock.rollouts.ragged import offsets_of_lengths

__all__ = ["CHUNK_TOKENS", "sum_rollouts_numpy"]

Float64 = NDArray[np.float64]

# Tokens of a chunk, so that its arrays stay in a core's cache: 32k float64 are 256 KiB.
CHUNK_TOKENS = 1 << 15


def sum_rollouts_numpy(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout, and of all of them together."""
    result = RolloutSums.empty(inputs.offsets.size - 1)
    totals = NumpyTotals(TokenIdTotals.for_ids(inputs.token_ids))
    # Values that are not log-probs, such as a logit of 1000, give infinity or NaN silently, as in machine code.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for first, last in _chunks(inputs.offsets):
            _add_chunk(result, totals, inputs, first, last)
    totals.finish(result)
    return result


def _chunks(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about CHUNK_TOKENS tokens each; a longer rollout is a chunk of its own."""
    first, rows = 0, offsets.size - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + CHUNK_TOKENS, side="right")) - 1
        last = max(min(last, rows), first + 1)
        yield first, last
        first = last


def _add_chunk(result: RolloutSums, totals: NumpyTotals, inputs: TokenInputs, first: int, last: int) -> None:
    """Drop the tokens that are not measured, then add the chunk's tokens to its rows and to the totals."""
    start, stop = int(inputs.offsets[first]), int(inputs.offsets[last])
    offsets = inputs.offsets[first : last + 1] - start
    target, behaviour = inputs.target[start:stop], inputs.behaviour[start:stop]
    finite_target, finite_behaviour = np.isfinite(target), np.isfinite(behaviour)
    keep = finite_target & finite_behaviour
    generated = np.ones(stop - start, np.bool_) if inputs.generated is None else inputs.generated[start:stop]
    result.nonfinite_target += int(np.count_nonzero(generated & ~finite_target))
    result.nonfinite_behaviour += int(np.count_nonzero(generated & ~finite_behaviour))
    keep &= generated
    rows = slice(first, last)
    result.generated[rows] = _counts(generated, offsets)
    lengths = _counts(keep, offsets)
    result.tokens[rows] = lengths
    if not lengths.any():
        return
    positions = np.arange(stop - start, dtype=np.int64) - np.repeat(offsets[:-1], np.diff(offsets))
    filled = np.flatnonzero(lengths)
    segments = _Segments(offsets_of_lengths(lengths[filled]), filled + first)
    kept = slice(None) if keep.all() else keep
    terms = _token_terms(target[kept], behaviour[kept])
    chunk = ChunkTokens(
        terms,
        segments.offsets,
        behaviour=behaviour[kept],
        positions=positions[kept],
        lengths=result.generated[segments.rows],
        entropy=_cut(inputs.entropy, start, stop, kept),
        turn=_cut(inputs.turn, start, stop, kept),
        lag=_cut(inputs.lag, start, stop, kept),
        token_ids=_cut(inputs.token_ids, start, stop, kept),
        advantage=_advantages(inputs, segments, start, stop, kept),
    )
    _add_rollouts(result, segments, terms)
    if chunk.entropy is not None:
        _add_entropy(result, segments, chunk.entropy, terms["log_behaviour"])
    if chunk.turn is not None:
        _add_turns(result, segments, chunk.turn, terms["d"])
    if chunk.advantage is not None:
        _add_advantage(result, segments, chunk.advantage, terms)
    totals.add(result, chunk)


@dataclass(frozen=True, slots=True)
class _Segments:
    """The rows of a chunk that have measured tokens: `offsets` of their tokens, `rows` in the result."""

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]

    def sum(self, values: NDArray[np.floating]) -> Float64:
        return np.add.reduceat(values, self.offsets[:-1], dtype=np.float64)

    def spread(self, values: Float64) -> Float64:
        return np.repeat(values, np.diff(self.offsets))


def _counts(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    if flags.all():
        return np.diff(offsets)
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags, dtype=np.int64)])
    return np.diff(running[offsets])


def _cut(values: NDArray[Any] | None, start: int, stop: int, kept: slice | NDArray[np.bool_]) -> NDArray[Any] | None:
    return None if values is None else values[start:stop][kept]


def _advantages(
    inputs: TokenInputs, segments: _Segments, start: int, stop: int, kept: slice | NDArray[np.bool_]
) -> Float64 | None:
    """Return the advantage of each measured token; NaN if it has none."""
    if inputs.advantage is None:
        return None
    if inputs.advantage.size == inputs.offsets[-1]:
        return inputs.advantage[start:stop][kept].astype(np.float64)
    return segments.spread(inputs.advantage[segments.rows].astype(np.float64))


def _token_terms(target: NDArray[np.floating], behaviour: NDArray[np.floating]) -> dict[str, Float64]:
    """Return by name the terms of TOKEN_SUMS that depend on one token's log-probs alone."""
    log_target, log_behaviour = target.astype(np.float64), behaviour.astype(np.float64)
    d = token.log_ratio(target, behaviour)
    above, below = token.ratio_minus_one(d), token.ratio_minus_one(-d)
    with np.errstate(under="ignore"):
        target_probability, behaviour_probability = np.exp(log_target), np.exp(log_behaviour)
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
        "log_target": log_target,
        "log_behaviour": log_behaviour,
        "target_probability": target_probability,
        "behaviour_probability": behaviour_probability,
        # |π − μ| = max(π, μ)·(1 − exp(−|d|)), without cancellation.
        "abs_probability_difference": np.maximum(target_probability, behaviour_probability) * -np.minimum(above, below),
    }


def _put(result: RolloutSums, segments: _Segments, name: str, values: NDArray[np.floating]) -> None:
    result.sums[segments.rows, TOKEN_SUMS.index(name)] = segments.sum(values)


def _add_rollouts(result: RolloutSums, segments: _Segments, terms: dict[str, Float64]) -> None:
    """Fill the rows: sums, ranges, and the second moments of probabilities about each rollout's own mean."""
    rows = segments.rows
    for name, values in terms.items():
        _put(result, segments, name, values)
    lengths = np.diff(segments.offsets)
    about_mean = {}
    for name in ("target_probability", "behaviour_probability", "abs_probability_difference"):
        means = result.sums[rows, TOKEN_SUMS.index(name)] / lengths
        about_mean[name] = terms[name] - segments.spread(means)
    target, behaviour, difference = about_mean.values()
    _put(result, segments, "within_target", target * target)
    _put(result, segments, "within_behaviour", behaviour * behaviour)
    _put(result, segments, "within_product", target * behaviour)
    _put(result, segments, "within_difference", difference * difference)
    result.min_d[rows] = np.minimum.reduceat(terms["d"], segments.offsets[:-1])
    result.max_d[rows] = np.maximum.reduceat(terms["d"], segments.offsets[:-1])


def _add_entropy(
    result: RolloutSums, segments: _Segments, entropy: NDArray[np.floating], log_behaviour: Float64
) -> None:
    """Add entropies H and excess surprisals −log μ − H."""
    known = np.isfinite(entropy)
    nats = np.where(known, entropy, 0.0).astype(np.float64)
    result.entropy_tokens[segments.rows] = _counts(known, segments.offsets)
    _put(result, segments, "entropy", nats)
    _put(result, segments, "surprisal", np.where(known, -log_behaviour - nats, 0.0))


def _add_turns(result: RolloutSums, segments: _Segments, turn: NDArray[np.integer], d: Float64) -> None:
    """Add the weight of each turn: the product of the ratios of its tokens."""
    begins = np.zeros(d.size, np.bool_)
    begins[segments.offsets[:-1]] = True
    begins[1:] |= turn[1:] != turn[:-1]
    result.turns[segments.rows] = segments.sum(begins.astype(np.float64)).astype(np.int64)
    weights = np.add.reduceat(d, np.flatnonzero(begins))
    result.turn_weights = result.turn_weights.merge(LogWeights.of(weights))


def _add_advantage(result: RolloutSums, segments: _Segments, advantage: Float64, terms: dict[str, Float64]) -> None:
    """Add the terms of the advantage A, over the tokens with a finite A."""
    known = np.isfinite(advantage)
    result.advantage_tokens[segments.rows] = _counts(known, segments.offsets)
    value = np.where(known, advantage, 0.0)
    d, above = terms["d"], terms["ratio_minus_one"]
    _put(result, segments, "advantage", value)
    _put(result, segments, "advantage2", value * value)
    _put(result, segments, "advantage_d", value * d)
    _put(result, segments, "d_with_advantage", np.where(known, d, 0.0))
    # `where` avoids ∞·0 for an infinite ρ and an advantage of 0.
    for name, sided in (("positive_advantage_skew", value > 0), ("negative_advantage_skew", value < 0)):
        _put(result, segments, name, np.multiply(value, above, where=sided, out=np.zeros_like(d)))
    lost = sided & (d < 0) & (terms["abs_probability_difference"] >= DPPO_PROBABILITY_GAP)
    result.bad_updates += int(np.count_nonzero(lost))
