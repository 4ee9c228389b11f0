"""Decode, check and measure shards, and fold the statistics of a step's shards. Independent of the database."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from foreshock import digests, errors, statistics_shards
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.fingerprint import Fingerprint
from foreshock.lint import collect_evidence
from foreshock.measures import comparison_statistics, rollout_summaries, step_statistics
from foreshock.measures.comparison import Comparison, StepMeasurement, measure_step
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_rollouts, encode_rollouts, parquet
from foreshock.rollouts.attributes import BatchAttributes
from foreshock_service.platform.decoding.worker import memory_limit, stored_limits
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.runs import events, judging


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """One comparison of a whole step: its measures by column, and the statistics and summaries behind them.

    `from_sample`: only some of the step's rollouts are included.
    """

    comparison: str
    measures: Mapping[str, float]
    statistics_version: int
    statistics: bytes
    summaries: bytes | None
    from_sample: bool = False
    buckets: bytes | None = None
    """Tokens, then mean k3, float64, of each bucket of probability; of TRAINER_ROLLOUT only."""


def fold_step(parts: Iterable[statistics_shards.ShardPart]) -> tuple[FoldedStatistics, ...]:
    """Return the measurements of a step from the parts of its shards, which are in the order of the shards.

    Parts of another version do not merge with this release's. They are left out, and the comparison counts as a sample.
    """
    by_comparison: defaultdict[str, list[statistics_shards.ShardPart]] = defaultdict(list)
    for part in parts:
        by_comparison[part.comparison].append(part)
    folded = []
    for comparison, group in sorted(by_comparison.items()):
        current = [part for part in group if part.statistics_version == STATISTICS_VERSION]
        if current:
            folded.append(replace(_fold(comparison, current), from_sample=len(current) < len(group)))
    return tuple(folded)


def _fold(comparison: str, parts: Sequence[statistics_shards.ShardPart]) -> FoldedStatistics:
    if comparison == STEP_ROW:
        step = reduce(
            step_statistics.StepStatistics.merge,
            (step_statistics.StepStatistics.from_bytes(part.statistics) for part in parts),
        )
        return FoldedStatistics(comparison, step.measures(), step.statistics_version, step.to_bytes(), None)
    statistics = reduce(
        comparison_statistics.ComparisonStatistics.merge,
        (comparison_statistics.ComparisonStatistics.from_bytes(part.statistics) for part in parts),
    )
    summaries = rollout_summaries.RolloutSummaries.concat(
        [rollout_summaries.RolloutSummaries.from_bytes(part.summaries) for part in parts if part.summaries is not None]
    )
    buckets = None
    if comparison == TRAINER_ROLLOUT:
        table = statistics.buckets()
        buckets = np.stack([table.tokens.astype(np.float64), table.k3_kl]).tobytes()
    return FoldedStatistics(
        comparison,
        Comparison(statistics, summaries).measures(),
        statistics.statistics_version,
        statistics.to_bytes(),
        summaries.to_bytes(),
        buckets=buckets,
    )


# Modules that a decoder process imports when it starts.
PRELOAD = (__name__,)

# Tolerance between the sums of the compiled pass and of numpy's, relative to the sum of absolute values.
_TOLERANCE = 1e-9
_COMPARED = (("n_tokens", "n_tokens"), ("sum_d", "sum_abs_d"), ("sum_k3", "sum_k3"))

# Fields of fingerprints that differ from step to step in every run.
_OF_A_STEP = frozenset({"weights_version", "weights_digest", "batch_composition"})
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "logprobs_mode", "length_cap", "trainer_policy", "entropy_policy",
    "clip_low", "clip_high", "loss_aggregation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredShard:
    """A measured shard: numbers of rollouts and response tokens, digest of the rollouts, statistics, lint evidence.

    `setup` is that of `setup_of`. If not all rollouts are stored in full, `full_rollouts` and `full_tokens` count those
    that are; the first `sampled_rollouts` of them are an unbiased sample, and the lint's evidence is of these, with the
    rewards and truncated responses of all.
    """

    rollouts: int
    tokens: int
    rollout_set_digest: str
    parts: tuple[statistics_shards.ShardPart, ...]
    lint: judging.LintPart
    setup: str
    full_rollouts: int | None = None
    full_tokens: int | None = None
    sampled_rollouts: int | None = None


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """A folded step: a measurement of each comparison, and the lint's verdict (None: no evidence)."""

    measurements: tuple[FoldedStatistics, ...]
    verdict: judging.StepVerdict | None

    @classmethod
    def of(cls, key: events.StepKey, shards: Sequence[MeasuredShard]) -> FoldedStep:
        """Return the fold of a step from its shards, in order."""
        verdict = judging.judge_step(key.step, key.attempt, [shard.lint for shard in shards])
        return cls(fold_step(part for shard in shards for part in shard.parts), verdict)


@dataclass(frozen=True, slots=True)
class DecodedShard:
    """A valid shard, the bytes of its file for the store, and the folded step if this is its only shard.

    `keeps_body`: the body has the layout of the store's files and is stored unchanged; nothing was written.
    """

    measured: MeasuredShard
    file_bytes: int
    step: FoldedStep | None
    keeps_body: bool = False


@contextmanager
def _damaged_statistics() -> Iterator[None]:
    """Raise InvalidRolloutsError for unreadable statistics: in this upload they are the client's, not the service's."""
    try:
        yield
    except errors.StatisticsError as error:
        raise errors.InvalidRolloutsError(str(error)) from error


@memory_limit()
def decode_shard(body: Path, stored: Path, limits: DecodeLimits, whole_step: events.StepKey | None) -> DecodedShard:
    """Check and measure the upload in `body`; write it to `stored` in the store's layout, unless `body` has it already.

    `whole_step` is the key of the step if this is its only shard; the step is then folded here. `stored` is not synced
    to disk; `TokenStore.publish` does that. Raises InvalidRolloutsError (names row and column) and LimitExceededError.
    """
    with body.open("rb") as file:
        read = parquet.read_rollouts(file, limits)
    measured = _measured(read.batch)
    step = FoldedStep.of(whole_step, [measured]) if whole_step is not None else None
    if read.own_layout:
        return DecodedShard(measured, body.stat().st_size, step, keeps_body=True)
    data = parquet.encode_rollouts_view(read.batch)
    stored.write_bytes(data)
    return DecodedShard(measured, len(data), step)


def measure_stored(stored: StoredFile) -> MeasuredShard:
    """Measure a file of the store again. Raises FileNotFoundError, and RolloutsError if the file is damaged."""
    return _measured(decode_rollouts(stored.read_bytes(), stored_limits()))


def is_intact(stored: StoredFile) -> bool:
    """Return whether a file of the store exists and is undamaged."""
    try:
        decode_rollouts(stored.read_bytes(), stored_limits())
    except (FileNotFoundError, errors.RolloutsError):
        return False
    return True


def _measured(batch: RolloutBatch) -> MeasuredShard:
    digest = digests.rollout_set_digest(batch.sample_ids)
    parts = statistics_shards.statistics_of_shard(measure_step(batch))
    lint_part = judging.LintPart.of(collect_evidence(batch))
    return MeasuredShard(batch.num_rollouts, batch.num_tokens, digest, parts, lint_part, setup_of(batch.attributes))


def setup_of(attributes: BatchAttributes) -> str:
    """Return the setup of a shard as canonical JSON: what its attributes say about engine, trainer and sampling.

    It has every field of the fingerprints except those that differ from step to step; `foreshock/environment.py` has
    the fields that make two scores comparable.
    """
    parts: dict[str, dict[str, Any]] = {
        "engine": _lasting(attributes.engine_fingerprint),
        "trainer": _lasting(attributes.trainer_fingerprint),
        "sampling": {name: value for name in _SAMPLING if (value := getattr(attributes, name)) is not None},
    }
    return digests.canonical_json({name: fields for name, fields in parts.items() if fields})


def _lasting(fingerprint: Fingerprint | None) -> dict[str, Any]:
    known = {} if fingerprint is None else fingerprint.to_dict()
    return {name: value for name, value in known.items() if name not in _OF_A_STEP}


@_damaged_statistics()
@memory_limit()
def decode_statistics(
    body: Path, stored: Path, limits: DecodeLimits, whole_step: events.StepKey | None
) -> DecodedShard:
    """Check the upload in `body` and write its rollouts in full, in the store's own layout, to `stored`.

    `whole_step` and errors are those of `decode_shard`; damaged statistics raise InvalidRolloutsError.
    """
    shard = statistics_shards.StatisticsShard.from_bytes(body.read_bytes())
    if shard.rollouts > limits.max_rollouts:
        raise errors.LimitExceededError(
            f"a shard must have at most {limits.max_rollouts:,} rollouts, got {shard.rollouts:,}: send more shards"
        )
    batch = decode_rollouts(io.BytesIO(shard.full), limits)
    measurement = _measurement(shard)
    _check(shard, measurement, batch)
    evidence = collect_evidence(batch.select(np.arange(shard.sampled)))
    if shard.sampled < shard.rollouts:
        evidence = evidence.of_sample(measurement)
    measured = MeasuredShard(
        shard.rollouts,
        shard.tokens,
        shard.rollout_set_digest,
        shard.statistics,
        judging.LintPart.of(evidence),
        setup_of(batch.attributes),
        *((batch.num_rollouts, batch.num_tokens, shard.sampled) if batch.num_rollouts < shard.rollouts else ()),
    )
    data = encode_rollouts(batch)
    step = FoldedStep.of(whole_step, [measured]) if whole_step is not None else None
    stored.write_bytes(data)
    return DecodedShard(measured, len(data), step)


def _measurement(shard: statistics_shards.StatisticsShard) -> StepMeasurement:
    """Return the statistics of the shard. Raises StatisticsError if one is damaged, missing or unknown."""
    parts = {part.comparison: part for part in shard.statistics}
    if STEP_ROW not in parts or not parts.keys() <= {STEP_ROW, TRAINER_ROLLOUT}:
        raise errors.StatisticsError(
            f"a shard of statistics must have {STEP_ROW!r}, and {TRAINER_ROLLOUT!r} if both log-probs were logged, "
            f"got {', '.join(sorted(parts)) or 'nothing'}"
        )
    comparisons = {}
    pair = parts.get(TRAINER_ROLLOUT)
    if pair is not None:
        comparisons[TRAINER_ROLLOUT] = Comparison(
            comparison_statistics.ComparisonStatistics.from_bytes(pair.statistics),
            rollout_summaries.RolloutSummaries.from_bytes(pair.summaries or b""),
        )
    return StepMeasurement(step_statistics.StepStatistics.from_bytes(parts[STEP_ROW].statistics), comparisons)


def _check(shard: statistics_shards.StatisticsShard, measurement: StepMeasurement, full: RolloutBatch) -> None:
    """Raise StatisticsError if parts of the shard contradict one another."""
    if not min(1, shard.rollouts) <= shard.sampled <= full.num_rollouts <= shard.rollouts:
        raise errors.StatisticsError(
            f"a shard of {shard.rollouts:,} rollouts must hold between 1 and that many in full, the sample first, got "
            f"{full.num_rollouts:,} with a sample of {shard.sampled:,}"
        )
    measures = measurement.step.measures()
    counted = (int(measures["num_rollouts"]), int(measures["num_tokens"] + measures["num_tool_tokens"]))
    if counted != (shard.rollouts, shard.tokens):
        raise errors.StatisticsError(
            f"the statistics are of {counted[0]:,} rollouts and {counted[1]:,} tokens, but the header names "
            f"{shard.rollouts:,} and {shard.tokens:,}"
        )
    pair = measurement.comparisons.get(TRAINER_ROLLOUT)
    both_logged = full.rollout_log_probs is not None and full.trainer_log_probs is not None
    if both_logged != (pair is not None):
        raise errors.StatisticsError("the statistics must compare both log-probs if the rollouts in full have both")
    if pair is not None:
        _check_summaries(shard, pair, full)


def _check_summaries(shard: statistics_shards.StatisticsShard, pair: Comparison, full: RolloutBatch) -> None:
    """Raise StatisticsError unless the summaries are those of the statistics and of the rollouts in full."""
    sample_ids = pair.summaries.table.column("sample_id").to_pylist()
    rows = {sample_id: row for row, sample_id in enumerate(sample_ids)}
    statistics = pair.statistics.measures()
    if (
        len(rows) != len(sample_ids)
        or None in rows
        or digests.rollout_set_digest(sample_ids) != shard.rollout_set_digest
        or len(sample_ids) != shard.rollouts
        or int(statistics["rollouts"]) != shard.rollouts
        or int(statistics["tokens"]) != int(pair.summaries.column("n_tokens").sum())
    ):
        raise errors.StatisticsError("the rollout summaries are not those of the shard's statistics")
    unknown = [sample_id for sample_id in full.sample_ids if sample_id not in rows]
    if unknown:
        raise errors.StatisticsError(f"the rollout {unknown[0]!r} in full is not in the statistics")
    again = measure_step(full).comparisons[TRAINER_ROLLOUT].summaries
    chosen = np.array([rows[sample_id] for sample_id in full.sample_ids], dtype=np.int64)
    for name, scale in _COMPARED:
        sent, found = pair.summaries.column(name)[chosen], again.column(name)
        allowed = _TOLERANCE * np.maximum(again.column(scale), 1.0)
        differ = np.flatnonzero(~((np.abs(sent - found) <= allowed) | (sent == found) | np.isnan(found)))
        if differ.size:
            row = int(differ[0])
            raise errors.StatisticsError(
                f"the statistics are not of the rollouts in full: {name} of {full.sample_ids[row]!r} is "
                f"{found[row]!r}, but {sent[row]!r} in the statistics"
            )
