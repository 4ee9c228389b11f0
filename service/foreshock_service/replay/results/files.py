"""Files of scores: check uploads, read stored files, align them with tokens, choose among environments.

Scores of one scorer in two environments coexist. A step's chain takes those whose environment differs least from the
run's, and of equally near ones the newest; the scores of other environments are compared with these.

These functions use no database; they run in a decoder process too.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock import environment, errors, rollouts, scorers
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.parquet_files import find_scores
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.parameters import storable_json
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts, read_rollouts


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """The size of a valid upload and the fingerprint of its scorer."""

    rollouts: int
    tokens: int
    fingerprint: Fingerprint


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
        """The environment that made it."""
        return environment_of(self.fingerprint)


def check_upload(body: Path, stored: Path, pinned: PinnedRollouts, limits: rollouts.DecodeLimits) -> CheckedFile:
    """Check the upload in `body` against its rollouts and write it, in the store's layout, to `stored`.

    Raises InvalidRolloutsError if the body is not a table of scores or lacks a rollout of the job, and names row and
    column if a rollout is not of the job or its number of values differs from its number of response tokens. Raises
    LimitExceededError beyond `limits`.
    """
    try:
        with body.open("rb") as file:
            scores = rollouts.decode_scores(file, limits)
        try:
            storable_json(scores.fingerprint.to_dict())
        except ValueError as error:
            raise errors.InvalidRolloutsError(f"its fingerprint {error}") from error
        _check_rollouts(scores, read_rollouts(pinned))
        data = rollouts.encode_scores(scores)
    except MemoryError as error:
        raise errors.LimitExceededError(
            "decoding needs more memory than FORESHOCK_DECODE_MEMORY_BYTES allows"
        ) from error
    # The file is on disk before the catalogue row that names it is committed.
    with stored.open("wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())
    return CheckedFile(scores.num_rollouts, scores.num_tokens, scores.fingerprint)


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
