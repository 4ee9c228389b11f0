"""One pass over the tokens of a comparison: what each rollout adds to every sum.

The rollout is the smallest part that shards, groups and corrections are made of. Its sums are made here, from its
tokens alone, so they are the same however rollouts were split; all that follows adds rollouts with compensated sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures import token
from foreshock.measures.buckets import (
    BUCKET_EDGES,
    POSITION_EDGES,
    BucketSums,
    position_buckets,
    probability_buckets,
)
from foreshock.measures.histograms import LOG_RATIO_GRID
from foreshock.measures.log_weights import LogWeights
from foreshock.rollouts.ragged import offsets_of_lengths

__all__ = ["TAIL_ASYMMETRY_THRESHOLD", "TAIL_THRESHOLDS", "TOKEN_SUMS", "RolloutSums", "TokenInputs", "sum_rollouts"]

Float64 = NDArray[np.float64]

TAIL_THRESHOLDS = (2, 5, 10)
TAIL_ASYMMETRY_THRESHOLD = 1

# What is summed over the tokens of each rollout; ρ enters as ρ − 1, which keeps its digits near 1.
TOKEN_SUMS = (
    "d",
    "abs_d",
    "d2",
    "k3_kl",
    "ratio_minus_one",
    "chi2_token",
    "reverse_chi2_token",
    "tv_token",
    "prob_error_minus_one",
    "log_target",
    "log_behaviour",
    "upper_ratio",
    "target_probability",
    "behaviour_probability",
    "abs_probability_difference",
    "within_target",
    "within_behaviour",
    "within_product",
    "within_difference",
    "entropy",
    "surprisal",
)

# A chunk's arrays should stay in a core's cache: 32k float64 are 256 KiB each.
_CHUNK_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """The tokens of N rollouts: [T] arrays cut by `offsets` [N + 1]. `generated` is False for tool output."""

    target: NDArray[np.floating]
    behaviour: NDArray[np.floating]
    offsets: NDArray[np.int64]
    generated: NDArray[np.bool_] | None = None
    entropy: NDArray[np.floating] | None = None
    turn: NDArray[np.integer] | None = None


@dataclass(slots=True, eq=False)
class RolloutSums:
    """Per rollout: `tokens` that were measured, `generated` ones, `sums` [N, len(TOKEN_SUMS)], the range of d (NaN
    where nothing was measured), `entropy_tokens`, `turns`. The rest is of all rollouts together.
    """

    tokens: NDArray[np.int64]
    generated: NDArray[np.int64]
    sums: Float64
    min_d: Float64
    max_d: Float64
    entropy_tokens: NDArray[np.int64]
    turns: NDArray[np.int64]
    nonfinite_target: int = 0
    nonfinite_behaviour: int = 0
    zero_tokens: int = 0
    below_threshold: int = 0
    max_probability_difference: float = 0.0
    tails: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(len(TAIL_THRESHOLDS), np.int64))
    histogram: NDArray[np.int64] = dataclasses.field(
        default_factory=lambda: np.zeros((2, LOG_RATIO_GRID.size), np.int64)
    )
    probabilities: BucketSums = dataclasses.field(default_factory=lambda: BucketSums.empty(BUCKET_EDGES))
    positions: BucketSums = dataclasses.field(default_factory=lambda: BucketSums.empty(POSITION_EDGES))
    token_weights: LogWeights = dataclasses.field(default_factory=LogWeights)
    turn_weights: LogWeights = dataclasses.field(default_factory=LogWeights)

    @classmethod
    def empty(cls, rollouts: int) -> RolloutSums:
        """Sums of `rollouts` rollouts that have no tokens yet."""
        return cls(
            tokens=np.zeros(rollouts, np.int64),
            generated=np.zeros(rollouts, np.int64),
            sums=np.zeros((rollouts, len(TOKEN_SUMS))),
            min_d=np.full(rollouts, np.nan),
            max_d=np.full(rollouts, np.nan),
            entropy_tokens=np.zeros(rollouts, np.int64),
            turns=np.zeros(rollouts, np.int64),
        )

    def column(self, name: str) -> Float64:
        """[N] the sums of one of TOKEN_SUMS."""
        return self.sums[:, TOKEN_SUMS.index(name)]


def sum_rollouts(inputs: TokenInputs) -> RolloutSums:
    """The sums of every rollout, made a cache-sized chunk of rollouts at a time."""
    result = RolloutSums.empty(inputs.offsets.size - 1)
    for first, last in _chunks(inputs.offsets):
        _add_chunk(result, inputs, first, last)
    return result


def _chunks(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of rows with about _CHUNK_TOKENS tokens each; a longer rollout is a chunk of its own."""
    first, rows = 0, offsets.size - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + _CHUNK_TOKENS, side="right")) - 1
        last = max(min(last, rows), first + 1)
        yield first, last
        first = last


def _add_chunk(result: RolloutSums, inputs: TokenInputs, first: int, last: int) -> None:
    """Drop what is not measured, then add the chunk's tokens to its rows and to the totals."""
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
    if not keep.all():
        target, behaviour, positions = target[keep], behaviour[keep], positions[keep]
    filled = np.flatnonzero(lengths)
    segments = _Segments(offsets_of_lengths(lengths[filled]), filled + first)
    terms = _token_terms(target, behaviour)
    _add_rollouts(result, segments, terms)
    _add_totals(result, terms, behaviour, positions)
    if inputs.entropy is not None:
        _add_entropy(result, segments, inputs.entropy[start:stop][keep], terms["log_behaviour"])
    if inputs.turn is not None:
        _add_turns(result, segments, inputs.turn[start:stop][keep], terms["d"])


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


def _token_terms(target: NDArray[np.floating], behaviour: NDArray[np.floating]) -> dict[str, Float64]:
    """The terms of TOKEN_SUMS that need no more than one token, by name."""
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
        "upper_ratio": np.where(d > TAIL_ASYMMETRY_THRESHOLD, above + 1.0, 0.0),
        "target_probability": target_probability,
        "behaviour_probability": behaviour_probability,
        # |π − μ| = max(π, μ)·(1 − exp(−|d|)), without cancellation.
        "abs_probability_difference": np.maximum(target_probability, behaviour_probability) * -np.minimum(above, below),
    }


def _add_rollouts(result: RolloutSums, segments: _Segments, terms: dict[str, Float64]) -> None:
    """Fill the rows: sums, ranges, and the second moments of probabilities about each rollout's own mean."""
    rows = segments.rows
    for name, values in terms.items():
        result.sums[rows, TOKEN_SUMS.index(name)] = segments.sum(values)
    lengths = np.diff(segments.offsets)
    about_mean = {}
    for name in ("target_probability", "behaviour_probability", "abs_probability_difference"):
        means = result.sums[rows, TOKEN_SUMS.index(name)] / lengths
        about_mean[name] = terms[name] - segments.spread(means)
    target, behaviour, difference = about_mean.values()
    for name, values in (
        ("within_target", target * target),
        ("within_behaviour", behaviour * behaviour),
        ("within_product", target * behaviour),
        ("within_difference", difference * difference),
    ):
        result.sums[rows, TOKEN_SUMS.index(name)] = segments.sum(values)
    result.min_d[rows] = np.minimum.reduceat(terms["d"], segments.offsets[:-1])
    result.max_d[rows] = np.maximum.reduceat(terms["d"], segments.offsets[:-1])


def _add_totals(
    result: RolloutSums, terms: dict[str, Float64], behaviour: NDArray[np.floating], positions: NDArray[np.int64]
) -> None:
    """Counts, histograms, buckets and token weights, which no rollout needs by itself."""
    d, distance = terms["d"], terms["abs_d"]
    result.tails += [int(np.count_nonzero(distance > np.log(threshold))) for threshold in TAIL_THRESHOLDS]
    result.below_threshold += int(np.count_nonzero(d < -TAIL_ASYMMETRY_THRESHOLD))
    result.max_probability_difference = max(
        result.max_probability_difference, float(terms["abs_probability_difference"].max())
    )
    # Zeros are counted apart; in the grid they would all fall into the bin of the tiniest differences.
    signs = (d > 0).astype(np.int64)
    bins = LOG_RATIO_GRID.bins(distance) + signs * LOG_RATIO_GRID.size
    counts = np.bincount(bins, minlength=2 * LOG_RATIO_GRID.size).reshape(2, -1)
    zeros = d.size - int(np.count_nonzero(d))
    counts[0, 0] -= zeros
    result.zero_tokens += zeros
    result.histogram += counts
    values = (distance, d, terms["k3_kl"], terms["abs_probability_difference"])
    result.probabilities = result.probabilities.merge(
        BucketSums.of(BUCKET_EDGES, probability_buckets(behaviour), values)
    )
    result.positions = result.positions.merge(BucketSums.of(POSITION_EDGES, position_buckets(positions), values))
    result.token_weights = result.token_weights.merge(LogWeights.of(d))


def _add_entropy(
    result: RolloutSums, segments: _Segments, entropy: NDArray[np.floating], log_behaviour: Float64
) -> None:
    """Entropies, and how much more surprising than they promise the sampled tokens were."""
    known = np.isfinite(entropy)
    nats = np.where(known, entropy, 0.0).astype(np.float64)
    result.entropy_tokens[segments.rows] = _counts(known, segments.offsets)
    result.sums[segments.rows, TOKEN_SUMS.index("entropy")] = segments.sum(nats)
    surprise = np.where(known, -log_behaviour - nats, 0.0)
    result.sums[segments.rows, TOKEN_SUMS.index("surprisal")] = segments.sum(surprise)


def _add_turns(result: RolloutSums, segments: _Segments, turn: NDArray[np.integer], d: Float64) -> None:
    """The weight of each turn: the product of the ratios of its tokens."""
    begins = np.zeros(d.size, np.bool_)
    begins[segments.offsets[:-1]] = True
    begins[1:] |= turn[1:] != turn[:-1]
    result.turns[segments.rows] = segments.sum(begins.astype(np.float64)).astype(np.int64)
    weights = np.add.reduceat(d, np.flatnonzero(begins))
    result.turn_weights = result.turn_weights.merge(LogWeights.of(weights))
