"""The token pass in numpy: the reference for every sum. It works on cache-sized chunks of rollouts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators import token
from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.measured import CHUNK_TOKENS, add_largest_and_turns, measured_tokens
from foreshock.measures.statistics.conditions import (
    BUCKET_SUMS,
    CONDITIONS,
    BucketSums,
    position_buckets,
    probability_buckets,
)
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.tails import ABOVE, REGIONS, TAIL_SUMS, regions_of
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS, TokenIdSums
from foreshock.rollouts.arrays import row_counts, row_ranges

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Terms = dict[str, Float64]


def sum_rollouts_numpy(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout, and of all of them together."""
    measured, positions, result = measured_tokens(inputs)
    if measured.token_ids is not None:
        ids = np.unique(measured.token_ids).astype(np.int64)
        table = np.zeros((ids.size, len(TOKEN_ID_SUMS)))
        result.token_ids = TokenIdSums(ids, np.zeros(ids.size, np.int64), table, np.zeros(ids.size))
    # Values that are not log-probs, such as a logit of 1000, give infinity or NaN silently, as in machine code.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for chunk in _chunks(measured, positions):
            terms = _token_terms(chunk)
            result.min_d[chunk.rows] = np.minimum.reduceat(chunk.d, chunk.offsets[:-1])
            result.max_d[chunk.rows] = np.maximum.reduceat(chunk.d, chunk.offsets[:-1])
            result.token_weights = result.token_weights.merge(LogWeights.of(chunk.d))
            _add_counts(result, chunk)
            _add_rollouts(result, chunk, terms)
            _add_regions(result, terms)
            for name, buckets in _buckets_by_condition(chunk, terms):
                result.conditions[name] = result.conditions[name].merge(buckets)
            if chunk.token_ids is not None:
                _add_token_ids(result, chunk.token_ids, terms)
        result.conditions["length"] = result.sums_by_length()
        add_largest_and_turns(result, measured)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
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


def _chunks(measured: TokenInputs, positions: Int64 | None) -> Iterator[_Chunk]:
    """Yield the measured tokens of the batch."""
    for first, last in row_ranges(measured.offsets, CHUNK_TOKENS):
        cuts = measured.offsets[first : last + 1]
        rows, cut = np.flatnonzero(np.diff(cuts)), slice(int(cuts[0]), int(cuts[-1]))
        if not rows.size:
            continue
        target, behaviour = measured.target[cut].astype(np.float64), measured.behaviour[cut].astype(np.float64)
        entropy, advantage = (
            None if each is None else each[cut].astype(np.float64) for each in (measured.entropy, measured.advantage)
        )
        turn, lag, token_ids = (
            None if each is None else each[cut] for each in (measured.turn, measured.lag, measured.token_ids)
        )
        consecutive = np.arange(cut.start, cut.stop) - np.repeat(cuts[:-1], np.diff(cuts))
        yield _Chunk(
            rows=rows + first,
            offsets=np.append(cuts[:-1][rows], cuts[-1]) - cut.start,
            target=target,
            behaviour=behaviour,
            d=target - behaviour,
            positions=consecutive if positions is None else positions[cut],
            entropy=entropy,
            turn=turn,
            lag=lag,
            token_ids=token_ids,
            advantage=advantage,
        )


def _add_counts(result: RolloutSums, chunk: _Chunk) -> None:
    """Count the tokens with an entropy, those with an advantage, and DPPO's bad updates."""
    if chunk.entropy is not None:
        result.entropy_tokens[chunk.rows] = row_counts(np.isfinite(chunk.entropy), chunk.offsets)
    if chunk.advantage is None:
        return
    known = np.isfinite(chunk.advantage)
    result.advantage_tokens[chunk.rows] = row_counts(known, chunk.offsets)
    # μ − π ≥ gap needs μ ≥ gap; the margin is for rounding.
    likely = chunk.behaviour > math.log(DPPO_PROBABILITY_GAP) - 1e-9
    places = np.flatnonzero(known & (chunk.advantage < 0) & (chunk.d < 0) & likely)
    lost = np.exp(chunk.behaviour[places]) * -np.expm1(chunk.d[places])
    result.bad_updates += int(np.count_nonzero(lost >= DPPO_PROBABILITY_GAP))


def _add_token_ids(result: RolloutSums, token_ids: NDArray[np.integer], terms: Terms) -> None:
    """Add the tokens to the table by token id, which has a row for each id of the batch."""
    table, (ids, places) = result.token_ids, np.unique(token_ids, return_inverse=True)
    rows = np.searchsorted(table.ids, ids)
    table.tokens[rows] += np.bincount(places)
    table.sums[rows] += np.stack([np.bincount(places, terms[name]) for name in TOKEN_ID_SUMS], axis=1)


def _add_regions(result: RolloutSums, terms: Terms) -> None:
    """Add the tokens to the histogram of |d| and to the regions of d, by the sign of d."""
    d, distance = terms["d"], terms["abs_d"]
    side = np.where(d > 0, ABOVE, 0)
    bins = LOG_RATIO_GRID.bins(distance) + side * LOG_RATIO_GRID.size
    result.histogram += np.bincount(bins, minlength=result.histogram.size).reshape(2, -1)
    # Zeros are counted separately; on the grid they would all be in the bin of the smallest differences.
    zeros = d.size - int(np.count_nonzero(d))
    result.histogram[0, 0] -= zeros
    result.zero_tokens += zeros
    regions = regions_of(distance) + side * REGIONS
    result.region_tokens += np.bincount(regions, minlength=2 * REGIONS).reshape(2, -1)
    for place, name in enumerate(TAIL_SUMS):
        if name in terms:
            result.region_sums[:, :, place] += np.bincount(regions, terms[name], 2 * REGIONS).reshape(2, -1)


def _token_terms(chunk: _Chunk) -> Terms:
    """Return the known terms of TOKEN_SUMS and TAIL_SUMS by name, without those about a rollout's mean."""
    d = chunk.d
    above, below = token.ratio_minus_one(d), token.ratio_minus_one(-d)
    target_probability, behaviour_probability = np.exp(chunk.target), np.exp(chunk.behaviour)
    terms = {
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
    if chunk.entropy is not None:
        known = np.isfinite(chunk.entropy)
        terms["entropy"] = np.where(known, chunk.entropy, 0.0)
        terms["surprisal"] = np.where(known, -chunk.behaviour - chunk.entropy, 0.0)
    if chunk.advantage is not None:
        known = np.isfinite(chunk.advantage)
        value = np.where(known, chunk.advantage, 0.0)
        # 0 if A is 0, even if ρ is infinite.
        skew = np.multiply(value, above, where=value != 0, out=np.zeros_like(above))
        terms |= {
            "advantage": value,
            "advantage_d": value * d,
            "positive_advantage_skew": np.where(value > 0, skew, 0.0),
            "negative_advantage_skew": np.where(value < 0, skew, 0.0),
            "d_with_advantage": np.where(known, d, 0.0),
            "advantage_ratio_minus_one": skew,
        }
    return terms


def _add_rollouts(result: RolloutSums, chunk: _Chunk, terms: Terms) -> None:
    """Fill the sums of each rollout, and the second moments of probabilities about the rollout's mean."""
    largest = float(terms["abs_probability_difference"].max())
    result.max_probability_difference = max(result.max_probability_difference, largest)
    target, behaviour, difference = (
        terms[name] - np.repeat(chunk.sum(terms[name]) / np.diff(chunk.offsets), np.diff(chunk.offsets))
        for name in ("target_probability", "behaviour_probability", "abs_probability_difference")
    )
    about_means = {
        "within_target": target * target,
        "within_behaviour": behaviour * behaviour,
        "within_product": target * behaviour,
        "within_difference": difference * difference,
    }
    for place, name in enumerate(TOKEN_SUMS):
        values = about_means[name] if name in about_means else terms.get(name)
        if values is not None:
            result.sums[chunk.rows, place] = chunk.sum(values)


def _buckets_by_condition(chunk: _Chunk, terms: Terms) -> Iterator[tuple[str, BucketSums]]:
    """Yield the chunk's bucket sums for each known condition except the length."""
    distance = terms["abs_d"]
    values = [terms[name] for name in BUCKET_SUMS]
    size = CONDITIONS["probability"].size
    yield "probability", BucketSums.of(size, probability_buckets(chunk.behaviour), values, distance)
    if chunk.entropy is not None:
        known = np.isfinite(chunk.entropy)
        condition = CONDITIONS["entropy"]
        buckets, of_known = condition.buckets(chunk.entropy[known]), [each[known] for each in values]
        yield "entropy", BucketSums.of(condition.size, buckets, of_known, distance[known])
    # Positions, turns and lags rarely change between tokens: sums over runs, then over buckets.
    for name, column in (("position", position_buckets(chunk.positions)), ("turn", chunk.turn), ("lag", chunk.lag)):
        if column is None:
            continue
        starts = np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))
        sums = [np.add.reduceat(each, starts) for each in values]
        buckets = column[starts].astype(np.int64) if name == "position" else CONDITIONS[name].buckets(column[starts])
        largest, tokens = np.maximum.reduceat(distance, starts), np.diff(starts, append=column.size)
        yield name, BucketSums.of(CONDITIONS[name].size, buckets, sums, largest, tokens)
