"""Decode, validate, measure and re-encode one uploaded shard. Runs in a decoder process, without a database.

Shards that arrive as statistics are in `statistics_shards.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreshock.comparisons import STEP_ROW
from foreshock.digests import rollout_set_digest
from foreshock.errors import LimitExceededError, RolloutsError
from foreshock.lint import LintEvidence
from foreshock.measures.comparison import StepMeasurement, measure_step
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_rollouts
from foreshock.rollouts.parquet import encode_rollouts_view, read_rollouts
from foreshock.statistics_shards import ShardPart, statistics_of_shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.tokens import StoredFile, write_private
from foreshock_service.runs.changes.setups import StoredSetup, setup_of
from foreshock_service.runs.lint.judging import LintPart, StepVerdict, judge_evidence, lint_shard
from foreshock_service.runs.measurements.folding import FoldedStatistics, bucket_bytes
from foreshock_service.runs.step_key import StepKey

# Modules that a decoder process imports when it starts.
PRELOAD = (__name__, "foreshock_service.runs.rollouts.statistics_shards")


@dataclass(frozen=True, slots=True)
class FullCount:
    """The rollouts of a shard that are stored in full, and their response tokens; the first `sampled` are unbiased."""

    rollouts: int
    tokens: int
    sampled: int


@dataclass(frozen=True, slots=True)
class MeasuredShard:
    """A measured shard: numbers of rollouts and response tokens, digest of the rollouts, statistics, lint evidence.

    `setup` is what its attributes name. `full` is None if all rollouts are stored in full; otherwise the lint's
    evidence is of a sample of those that are.
    """

    rollouts: int
    tokens: int
    rollout_set_digest: str
    parts: tuple[ShardPart, ...]
    lint: LintPart
    setup: StoredSetup
    full: FullCount | None = None


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """A folded step: a measurement of each comparison, and the lint's verdict (None: no evidence)."""

    measurements: tuple[FoldedStatistics, ...]
    verdict: StepVerdict | None


@dataclass(frozen=True, slots=True)
class DecodedShard:
    """A valid shard, the bytes of its file for the store, and the folded step if this is its only shard.

    `keeps_body`: the body is laid out as the store's files are, and is stored as it came; nothing was written.
    """

    measured: MeasuredShard
    file_bytes: int
    step: FoldedStep | None
    keeps_body: bool = False


@contextmanager
def memory_limit() -> Iterator[None]:
    """Raise LimitExceededError where a decoder runs out of memory."""
    try:
        yield
    except MemoryError as error:
        raise LimitExceededError(
            "decoding needs more memory than FORESHOCK_DECODE_MEMORY_BYTES allows: send smaller shards"
        ) from error


def decode_shard(body: Path, stored: Path, limits: DecodeLimits, whole_step: StepKey | None) -> DecodedShard:
    """Check and measure the upload in `body` and write it, in the store's own layout, to `stored`, unless it has it.

    `whole_step` is the key of the step if this is its only shard; the step is then folded here. `stored` is not synced
    to disk; `TokenStore.publish` does that. Raises InvalidRolloutsError (names row and column) and LimitExceededError.
    """
    with memory_limit():
        with body.open("rb") as file:
            read = read_rollouts(file, limits)
        measurement = measure_step(read.batch)
        evidence = lint_shard(read.batch)
        measured = _shard(read.batch, measurement, evidence)
        data = None if read.own_layout else encode_rollouts_view(read.batch)
        step = fold_whole_step(whole_step, measurement, measured, evidence) if whole_step is not None else None
    if data is None:
        return DecodedShard(measured, body.stat().st_size, step, keeps_body=True)
    write_private(stored, data)
    return DecodedShard(measured, len(data), step)


def measure_stored(stored: StoredFile) -> MeasuredShard:
    """Measure a file of the store again. Raises FileNotFoundError, and RolloutsError if the file is damaged."""
    batch = decode_rollouts(stored.read_bytes(), stored_limits())
    return _shard(batch, measure_step(batch), lint_shard(batch))


def is_intact(stored: StoredFile) -> bool:
    """Return whether a file of the store is there and reads as it was written."""
    try:
        decode_rollouts(stored.read_bytes(), stored_limits())
    except (FileNotFoundError, RolloutsError):
        return False
    return True


def _shard(batch: RolloutBatch, measurement: StepMeasurement, evidence: LintEvidence) -> MeasuredShard:
    digest = rollout_set_digest(batch.sample_ids)
    setup = setup_of(batch.attributes)
    parts = statistics_of_shard(measurement)
    return MeasuredShard(batch.num_rollouts, batch.num_tokens, digest, parts, LintPart.of(evidence), setup)


def fold_whole_step(
    key: StepKey, measurement: StepMeasurement, shard: MeasuredShard, evidence: LintEvidence
) -> FoldedStep:
    """Return the fold of a step with one shard, whose statistics are those of the shard."""
    measures = {STEP_ROW: measurement.step.measures()}
    measures |= {name: pair.measures() for name, pair in measurement.comparisons.items()}
    buckets = {name: bucket_bytes(name, pair.statistics) for name, pair in measurement.comparisons.items()}
    folded = (
        FoldedStatistics(
            part.comparison,
            measures[part.comparison],
            part.statistics_version,
            part.statistics,
            part.summaries,
            buckets=buckets.get(part.comparison),
        )
        for part in shard.parts
    )
    return FoldedStep(tuple(folded), judge_evidence(key.step, key.attempt, [evidence]))
