"""Check what workers upload for the rollouts of a probe, and write it. Runs in a decoder process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.schemas import storable_json


def check_fingerprint(fingerprint: Fingerprint) -> None:
    """Raise InvalidRolloutsError if the database cannot store the fingerprint."""
    try:
        storable_json(fingerprint.to_dict())
    except ValueError as error:
        raise InvalidRolloutsError(f"its fingerprint {error}") from error


def check_one_value_per_token(
    sample_ids: Sequence[str], lengths: NDArray[np.int64], rollouts: RolloutBatch, column: str
) -> None:
    """Raise InvalidRolloutsError unless all rollouts are of the job, with as many values as response tokens."""
    expected = dict(zip(rollouts.sample_ids, rollouts.response_lengths.tolist(), strict=True))
    for row, (sample_id, length) in enumerate(zip(sample_ids, lengths.tolist(), strict=True)):
        if sample_id not in expected:
            raise InvalidRolloutsError(f"{sample_id!r} is not one of this job's rollouts", row=row, column="sample_id")
        if length != expected[sample_id]:
            raise InvalidRolloutsError(
                f"got {length} values, expected {expected[sample_id]}, one for each response token",
                row=row,
                column=column,
            )


def check_rollouts_are_new(sample_ids: Sequence[str], of_sibling: Sequence[str]) -> None:
    """Raise InvalidRolloutsError if another shard of the same result has one of the rollouts."""
    rows = {sample_id: row for row, sample_id in enumerate(sample_ids)}
    for sample_id in of_sibling:
        if sample_id in rows:
            raise InvalidRolloutsError(
                f"{sample_id!r} is in another shard of this score: send each rollout once",
                row=rows[sample_id],
                column="sample_id",
            )


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk: the catalogue row that names it is committed next."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
