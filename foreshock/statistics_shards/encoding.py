"""Measure a shard where it was sampled, and encode its statistics with the rollouts that travel in full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.digests import rollout_set_digest
from foreshock.measures.comparison import StepMeasurement, measure_step
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.parquet import encode_rollouts_view
from foreshock.rollouts.sampling import select_rollouts
from foreshock.statistics_shards.body import StatisticsShard
from foreshock.statistics_shards.statistics import statistics_of_shard

__all__ = ["FullRollouts", "encode_statistics_shard"]

# Room for the header of the body, whose numbers are not known yet.
_HEADER_BYTES = 1024
# A second try aims this much below the bound, and is made if the first one used less of it than _FULL_ENOUGH.
_MARGIN, _FULL_ENOUGH = 0.97, 0.9

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FullRollouts:
    """How many rollouts of a shard travel in full: `sampled` by length, and the `worst` by their largest |d|.

    Of the sample, fewer travel if the whole body would exceed `max_bytes`; at least one always does.
    """

    sampled: int = 64
    worst: int = 4
    max_bytes: int = 950_000

    def of_shard(self, shard: int, shards: int) -> FullRollouts:
        """Return the part of one shard, if these numbers are for a whole step of `shards` shards.

        Every shard sends at least one of both: it does not know whether others have worse ones.
        """
        sampled = self.sampled // shards + (shard < self.sampled % shards)
        worst = max(1, self.worst // shards) if self.worst else 0
        return FullRollouts(max(1, sampled), worst, self.max_bytes // shards)


def encode_statistics_shard(batch: RolloutBatch, *, seed: str, full: FullRollouts) -> bytes:
    """Return the body of a batch: its statistics over all tokens, and some rollouts in full.

    Equal batches, seeds and numbers give equal bytes under one release and one pass over the tokens.
    """
    measurement = measure_step(batch)
    statistics = statistics_of_shard(measurement)
    used = _HEADER_BYTES + sum(len(each.statistics) + len(each.summaries or b"") for each in statistics)
    worst = _worst(measurement, full.worst)
    sampled, encoded = _encode_full(batch, seed, full.sampled, worst, full.max_bytes - used)
    return StatisticsShard(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        sampled=sampled,
        statistics=statistics,
        full=encoded,
    ).to_bytes()


def _worst(measurement: StepMeasurement, most: int) -> Rows:
    """Return the rows of the rollouts with the largest |d| of a token, worst first; none without both log-probs."""
    pair = measurement.comparisons.get(TRAINER_ROLLOUT)
    if pair is None or most == 0:
        return np.zeros(0, np.int64)
    largest = pair.summaries.largest_abs_d()
    order = np.argsort(-np.nan_to_num(largest, nan=-1.0), kind="stable")[:most]
    return np.asarray(order[~np.isnan(largest[order])], dtype=np.int64)


def _encode_full(batch: RolloutBatch, seed: str, most: int, worst: Rows, max_bytes: int) -> tuple[int, memoryview]:
    """Return the size of the sample, and the Parquet file of the sample followed by the other worst rollouts."""
    most = min(most, batch.num_rollouts)
    wanted = min(most, _most_that_fit(batch, worst, max_bytes))
    # The estimate is of a few rollouts, which compress worse than many: one more try with the measured size.
    size, encoded = _encode_sample(batch, seed, wanted, worst)
    if len(encoded) > max_bytes or (size < most and len(encoded) < _FULL_ENOUGH * max_bytes):
        wanted = max(1, min(most, int(_MARGIN * wanted * max_bytes / len(encoded))))
        size, encoded = _encode_sample(batch, seed, wanted, worst)
    while len(encoded) > max_bytes and wanted > 1:
        wanted = max(1, min(wanted - 1, int(_MARGIN * wanted * max_bytes / len(encoded))))
        size, encoded = _encode_sample(batch, seed, wanted, worst)
    return size, encoded


def _encode_sample(batch: RolloutBatch, seed: str, most: int, worst: Rows) -> tuple[int, memoryview]:
    sample = select_rollouts(batch.sample_ids, batch.response_lengths, most, seed)
    rows = np.concatenate([sample, worst[~np.isin(worst, sample)]])
    return sample.size, encode_rollouts_view(batch.select(rows))


def _most_that_fit(batch: RolloutBatch, worst: Rows, max_bytes: int) -> int:
    """Return how many rollouts of mean length fit beside the worst, estimated from the bytes of a few rollouts."""
    tokens = batch.response_lengths + np.diff(batch.prompt_offsets)
    if batch.num_rollouts == 0 or not tokens.any():
        return batch.num_rollouts
    few = worst if worst.size else np.arange(min(4, batch.num_rollouts))
    trial = len(encode_rollouts_view(batch.select(few)))
    per_rollout = trial / max(int(tokens[few].sum()), 1) * float(tokens.mean())
    left = max_bytes - (trial if worst.size else 0)
    return max(1, int(left / max(per_rollout, 1.0)))
