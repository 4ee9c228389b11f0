"""Check an uploaded shard of statistics and store its rollouts in full. Runs in a decoder process, without a database.

The statistics were computed by the client. They are read by the code that wrote them, must agree with one another, and
with what the rollouts in full give; beyond that they are taken as sent.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.digests import rollout_set_digest
from foreshock.errors import InvalidRolloutsError, LimitExceededError, StatisticsError
from foreshock.measures.comparison import Comparison, StepMeasurement, measure_step
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.step_statistics import StepStatistics
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_rollouts, encode_rollouts
from foreshock.statistics_shards import StatisticsShard
from foreshock_service.platform.store.tokens import write_private
from foreshock_service.runs.changes.setups import setup_of
from foreshock_service.runs.lint.judging import LintPart, lint_shard
from foreshock_service.runs.rollouts.shards import (
    DecodedShard,
    FullCount,
    MeasuredShard,
    fold_whole_step,
    memory_limit,
)
from foreshock_service.runs.step_key import StepKey

# Between sums of the compiled pass and of numpy's, relative to the sum of absolute values.
_TOLERANCE = 1e-9
_COMPARED = (("sum_d", "sum_abs_d"), ("sum_k3", "sum_k3"))


def decode_statistics(body: Path, stored: Path, limits: DecodeLimits, whole_step: StepKey | None) -> DecodedShard:
    """Check the upload in `body` and write its rollouts in full, in the store's own layout, to `stored`.

    `whole_step` and errors are those of `decode_shard`; damaged statistics raise InvalidRolloutsError.
    """
    try:
        with memory_limit():
            return _decode(body, stored, limits, whole_step)
    except StatisticsError as error:
        raise InvalidRolloutsError(str(error)) from error


def _decode(body: Path, stored: Path, limits: DecodeLimits, whole_step: StepKey | None) -> DecodedShard:
    shard = StatisticsShard.from_bytes(body.read_bytes())
    if shard.rollouts > limits.max_rollouts:
        raise LimitExceededError(
            f"a shard must have at most {limits.max_rollouts:,} rollouts, got {shard.rollouts:,}: send more shards"
        )
    batch = decode_rollouts(io.BytesIO(shard.full), limits)
    measurement = _measurement(shard)
    _check(shard, measurement, batch)
    evidence = lint_shard(batch.select(np.arange(shard.sampled)))
    measured = MeasuredShard(
        shard.rollouts,
        shard.tokens,
        shard.rollout_set_digest,
        shard.statistics,
        LintPart.of(evidence),
        setup_of(batch.attributes),
        FullCount(batch.num_rollouts, batch.num_tokens, shard.sampled) if batch.num_rollouts < shard.rollouts else None,
    )
    data = encode_rollouts(batch)
    step = fold_whole_step(whole_step, measurement, measured, evidence) if whole_step is not None else None
    write_private(stored, data)
    return DecodedShard(measured, len(data), step)


def _measurement(shard: StatisticsShard) -> StepMeasurement:
    """Return the statistics of the shard. Raises StatisticsError if one is damaged, missing or unknown."""
    parts = {part.comparison: part for part in shard.statistics}
    if STEP_ROW not in parts or not parts.keys() <= {STEP_ROW, TRAINER_ROLLOUT}:
        raise StatisticsError(
            f"a shard of statistics must have {STEP_ROW!r}, and {TRAINER_ROLLOUT!r} if both log-probs were logged, "
            f"got {', '.join(sorted(parts)) or 'nothing'}"
        )
    comparisons = {}
    pair = parts.get(TRAINER_ROLLOUT)
    if pair is not None:
        comparisons[TRAINER_ROLLOUT] = Comparison(
            ComparisonStatistics.from_bytes(pair.statistics), RolloutSummaries.from_bytes(pair.summaries or b"")
        )
    return StepMeasurement(StepStatistics.from_bytes(parts[STEP_ROW].statistics), comparisons)


def _check(shard: StatisticsShard, measurement: StepMeasurement, full: RolloutBatch) -> None:
    """Raise StatisticsError if parts of the shard contradict one another."""
    if not min(1, shard.rollouts) <= shard.sampled <= full.num_rollouts <= shard.rollouts:
        raise StatisticsError(
            f"a shard of {shard.rollouts:,} rollouts must hold between 1 and that many in full, the sample first, got "
            f"{full.num_rollouts:,} with a sample of {shard.sampled:,}"
        )
    measures = measurement.step.measures()
    counted = (int(measures["num_rollouts"]), int(measures["num_tokens"] + measures["num_tool_tokens"]))
    if counted != (shard.rollouts, shard.tokens):
        raise StatisticsError(
            f"the statistics are of {counted[0]:,} rollouts and {counted[1]:,} tokens, but the header names "
            f"{shard.rollouts:,} and {shard.tokens:,}"
        )
    pair = measurement.comparisons.get(TRAINER_ROLLOUT)
    both_logged = full.rollout_log_probs is not None and full.trainer_log_probs is not None
    if both_logged != (pair is not None):
        raise StatisticsError("the statistics must compare both log-probs if the rollouts in full have both")
    if pair is not None:
        _check_summaries(shard, pair, full)


def _check_summaries(shard: StatisticsShard, pair: Comparison, full: RolloutBatch) -> None:
    """Raise StatisticsError unless the summaries are those of the statistics and of the rollouts in full."""
    sample_ids = pair.summaries.table.column("sample_id").to_pylist()
    rows = {sample_id: row for row, sample_id in enumerate(sample_ids)}
    statistics = pair.statistics.measures()
    if (
        len(rows) != len(sample_ids)
        or None in rows
        or rollout_set_digest(sample_ids) != shard.rollout_set_digest
        or len(sample_ids) != shard.rollouts
        or int(statistics["rollouts"]) != shard.rollouts
        or int(statistics["tokens"]) != int(pair.summaries.column("n_tokens").sum())
    ):
        raise StatisticsError("the rollout summaries are not those of the shard's statistics")
    unknown = [sample_id for sample_id in full.sample_ids if sample_id not in rows]
    if unknown:
        raise StatisticsError(f"the rollout {unknown[0]!r} in full is not in the statistics")
    again = measure_step(full).comparisons[TRAINER_ROLLOUT].summaries
    chosen = np.array([rows[sample_id] for sample_id in full.sample_ids], dtype=np.int64)
    for name, scale in (("n_tokens", "n_tokens"), *_COMPARED):
        sent, found = pair.summaries.column(name)[chosen], again.column(name)
        allowed = _TOLERANCE * np.maximum(again.column(scale), 1.0)
        differ = np.flatnonzero(~((np.abs(sent - found) <= allowed) | (sent == found) | np.isnan(found)))
        if differ.size:
            row = int(differ[0])
            raise StatisticsError(
                f"the statistics are not of the rollouts in full: {name} of {full.sample_ids[row]!r} is "
                f"{found[row]!r}, but {sent[row]!r} in the statistics"
            )
