"""Files of a probe: the rollouts that it pins, and scores: check uploads, align them, choose among environments.

A probe pins all of its shards, or a sample that keeps the distribution of lengths.

Scores of one scorer in two environments coexist. A step's chain takes those whose environment differs least from the
run's, and of equally near ones the newest; the scores of other environments are compared with these.

These functions use no database; they run in a decoder process too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock import environment, errors, rollouts, scorers
from foreshock.digests import rollout_set_digest
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import BatchAttributes, sampling
from foreshock.rollouts.parquet_files import find_scores
from foreshock_service.platform.decoding.worker import memory_limit, stored_limits
from foreshock_service.platform.parameters import storable_json
from foreshock_service.platform.store.tokens import StoredFile


@dataclass(frozen=True, slots=True)
class PinnedRollouts:
    """The token files in the order of their shards, and the size of the sample (None: all rollouts).

    The file of a shard that was sent as statistics begins with a sample, whose size is in `samples`; rollouts chosen
    for their large differences follow. Only the sample is pinned. `unstored` counts the shards' other rollouts.
    """

    files: tuple[StoredFile, ...]
    max_rollouts: int | None
    samples: tuple[int | None, ...] = ()
    unstored: int = 0


@dataclass(frozen=True, slots=True)
class RolloutCount:
    """Numbers of rollouts and response tokens, and the digest of the sample ids; `of_rollouts` counts whole shards.

    `attributes` are those of the batch. `with_log_probs`: log-probs of the engine or the trainer were logged.
    """

    rollouts: int
    tokens: int
    rollout_set_digest: str
    of_rollouts: int
    attributes: BatchAttributes
    with_log_probs: bool


def read_rollouts(pinned: PinnedRollouts) -> rollouts.RolloutBatch:
    """Return the pinned rollouts in the order of their shards."""
    batches = []
    for file, sample in zip(pinned.files, pinned.samples or [None] * len(pinned.files), strict=True):
        batch = rollouts.decode_rollouts(file.read_bytes(), stored_limits())
        batches.append(batch if sample is None else batch.select(range(sample)))
    batch = rollouts.RolloutBatch.concat(batches)
    if pinned.max_rollouts is None or pinned.max_rollouts >= batch.num_rollouts:
        return batch
    return batch.select(sampling.select_rollouts(batch.sample_ids, batch.response_lengths, pinned.max_rollouts))


def count_rollouts(pinned: PinnedRollouts) -> RolloutCount:
    """Count the pinned rollouts.

    Raises InvalidRolloutsError if two shards have the same sample id: their scores could not be distinguished.
    """
    everything = read_rollouts(replace(pinned, max_rollouts=None))
    if len(set(everything.sample_ids)) != everything.num_rollouts:
        raise errors.InvalidRolloutsError("two shards of the step have the same sample_id", column="sample_id")
    batch = read_rollouts(pinned)
    return RolloutCount(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        rollout_set_digest=rollout_set_digest(batch.sample_ids),
        of_rollouts=everything.num_rollouts + pinned.unstored,
        attributes=batch.attributes,
        with_log_probs=batch.rollout_log_probs is not None or batch.trainer_log_probs is not None,
    )


def write_rollouts(pinned: PinnedRollouts, target: Path) -> None:
    target.write_bytes(rollouts.encode_rollouts(read_rollouts(pinned)))


@dataclass(frozen=True, slots=True)
class StoredScore:
    """A published score: its scorer, variant, fingerprint and file."""

    scorer: str
    variant: str
    file: StoredFile
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`vllm.prefill`, or `vllm.prefill@rebatched`."""
        return scorers.score_name(self.scorer, self.variant)

    @property
    def environment(self) -> environment.Environment:
        return environment_of(self.fingerprint)


@memory_limit()
def check_upload(body: Path, stored: Path, pinned: PinnedRollouts, limits: rollouts.DecodeLimits) -> Fingerprint:
    """Check the upload in `body` against its rollouts, write it to `stored`, and return its scorer's fingerprint.

    Raises InvalidRolloutsError if the body is not a table of scores or lacks a rollout of the job, and names row and
    column if a rollout is not of the job or its number of values differs from its number of response tokens. Raises
    LimitExceededError beyond `limits`.
    """
    with body.open("rb") as file:
        scores = rollouts.decode_scores(file, limits)
    try:
        storable_json(scores.fingerprint.to_dict())
    except ValueError as error:
        raise errors.InvalidRolloutsError(f"its fingerprint {error}") from error
    _check_rollouts(scores, read_rollouts(pinned))
    stored.write_bytes(rollouts.encode_scores(scores))
    return scores.fingerprint


def read_aligned_scores(batch: rollouts.RolloutBatch, file: StoredFile) -> NDArray[np.float32]:
    """Return the log-probs in `file`, [T] in the order of the batch's response tokens; NaN for unscored rollouts.

    Only the row groups that hold rollouts of the batch are read.
    """
    aligned = np.full(batch.num_tokens, np.nan, np.float32)
    rows = {sample_id: row for row, sample_id in enumerate(batch.sample_ids)}
    scores = find_scores(file, frozenset(rows), stored_limits())
    for index, sample_id in enumerate(scores.sample_ids if scores is not None else ()):
        if scores is not None and sample_id in rows:
            start, end = batch.response_offsets[rows[sample_id] : rows[sample_id] + 2]
            aligned[start:end] = scores.log_probs[scores.offsets[index] : scores.offsets[index + 1]]
    return aligned


def _check_rollouts(scores: rollouts.ScoreBatch, rollouts: rollouts.RolloutBatch) -> None:
    """Raise InvalidRolloutsError unless these are the job's rollouts, with as many values as response tokens."""
    expected = dict(zip(rollouts.sample_ids, rollouts.response_lengths.tolist(), strict=True))
    lengths = np.diff(scores.offsets).tolist()
    for row, (sample_id, length) in enumerate(zip(scores.sample_ids, lengths, strict=True)):
        if sample_id not in expected:
            raise errors.InvalidRolloutsError(
                f"{sample_id!r} is not one of this job's rollouts", row=row, column="sample_id"
            )
        if length != expected[sample_id]:
            raise errors.InvalidRolloutsError(
                f"got {length} values, expected {expected[sample_id]}, one for each response token",
                row=row,
                column="log_probs",
            )
    missing = expected.keys() - set(scores.sample_ids)
    if missing:
        raise errors.InvalidRolloutsError(
            f"{len(missing)} of the job's {len(expected)} rollouts have no values, such as {min(missing)!r}"
        )


def environment_of(made: Mapping[str, Any]) -> environment.Environment:
    """Return the environment of a score's fingerprint; one without any known field if the fingerprint is invalid."""
    try:
        return environment.Environment.of_fingerprint(Fingerprint.from_dict(made))
    except errors.ConfigurationError:
        return environment.Environment()


def preferred_scores(scores: Sequence[StoredScore], run: Mapping[str, Fingerprint | None]) -> list[StoredScore]:
    """Return one score for each scorer and variant, in the order of their names.

    `scores` are newest first. Of a scorer's plain scores this is the one whose environment differs in the fewest fields
    from that of the run's logged score of the same side (`run` has the fingerprints of `rollout` and `trainer`), and of
    equally near ones the newest. Of a variant it is the score nearest to the environment of the chosen plain score.
    """
    chosen: dict[tuple[str, str], StoredScore] = {}
    # A plain score comes before its variants.
    for name, variant in sorted({(score.scorer, score.variant) for score in scores}):
        again = [score for score in scores if (score.scorer, score.variant) == (name, variant)]
        own = chosen[name, ""].environment if (name, "") in chosen else _own_environment(name, run)
        chosen[name, variant] = _nearest(own, again)
    return list(chosen.values())


def other_environments(scores: Sequence[StoredScore], chosen: StoredScore) -> list[StoredScore]:
    """Return the plain scores of the same scorer on other platforms than `chosen`, the newest of each first."""
    found = {chosen.environment.platform: chosen}
    for score in scores:
        if score.scorer == chosen.scorer and not score.variant:
            found.setdefault(score.environment.platform, score)
    return list(found.values())[1:]


def _own_environment(scorer: str, run: Mapping[str, Fingerprint | None]) -> environment.Environment | None:
    side = scorers.SCORERS[scorer].side if scorer in scorers.SCORERS else None
    sides = {"engine": ("rollout", "trainer"), "trainer": ("trainer", "rollout")}[side or "trainer"]
    known = next((run[name] for name in sides if run.get(name) is not None), None)
    return environment.Environment.of_fingerprint(known) if known is not None else None


def _nearest(own: environment.Environment | None, scores: Sequence[StoredScore]) -> StoredScore:
    """Return the score whose environment differs in the fewest fields from `own` (None: it is not known)."""
    if own is None:
        return scores[0]
    made = [score.environment for score in scores]
    distances = [len(environment.differences(own, each, same_engine=own.engine == each.engine)) for each in made]
    return scores[distances.index(min(distances))]
