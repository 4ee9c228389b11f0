"""Stored shards of rollouts: their catalogue rows, statistics and evidence of the lint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from foreshock.statistics_shards import ShardPart
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.problem import TokensPurged
from foreshock_service.runs.lint.service import add_evidence, replace_evidence
from foreshock_service.runs.rollouts import repository
from foreshock_service.runs.rollouts.repository import StoredPart, StoredTokens
from foreshock_service.runs.rollouts.shards import MeasuredShard
from foreshock_service.runs.step_key import StepKey

Stored = TypeVar("Stored", Shard, StoredTokens)
ShardVersions = frozenset[tuple[int, int]]
"""(shard, version of its statistics): equal for two reads of a step unless a shard was added or measured again."""


def find_shard(session: Session, key: StepKey, shard: int) -> Shard | None:
    """Return the catalogue row of a shard; None if it was not uploaded."""
    return repository.find(session, key, shard)


def shards_of_step(session: Session, key: StepKey) -> Sequence[Shard]:
    """Return the catalogue rows of a step's shards, in order."""
    return repository.shards_of_step(session, key)


def shards_with_tokens(session: Session, key: StepKey) -> list[Shard]:
    """Return the catalogue rows of the shards of a step whose tokens are stored, in order.

    Raises TokensPurged if the tokens of all its shards were removed.
    """
    return _present(key, repository.shards_of_step(session, key))


def token_files(session: Session, key: StepKey) -> list[StoredTokens]:
    """Return the token files of the shards of a step whose tokens are stored, in order.

    Raises TokensPurged if the tokens of all its shards were removed.
    """
    return _present(key, repository.files_of_step(session, key))


def removed_in_words(tokens_removed: str | None) -> str:
    """Return why the tokens of a shard are no longer stored."""
    return "tokens purged by retention" if tokens_removed == "retention" else "its rollouts were deleted"


def statistics_of_step(session: Session, key: StepKey) -> Sequence[StoredPart]:
    """Return the statistics of a step's shards, by comparison and then in the order of shards."""
    return repository.statistics_of_step(session, key)


def shards_out_of_date(session: Session, key: StepKey) -> Sequence[Shard]:
    """Return the shards of a step whose statistics are of another version than this release's, in order."""
    return repository.out_of_date(session, key)


def shard_versions(session: Session, key: StepKey) -> ShardVersions:
    """Return which shards a step has, and of which version the statistics of each are."""
    return frozenset(repository.versions_of_step(session, key))


def add_shard(
    session: Session, key: StepKey, row: dict[str, Any], measured: MeasuredShard, *, is_whole_step: bool
) -> None:
    """Add a shard: its catalogue row (the commit point of an upload), its statistics and its evidence.

    `is_whole_step`: the same transaction stores the step's measurements, which hold the same statistics.
    """
    repository.add(session, row)
    if not is_whole_step:
        repository.add_statistics(session, _statistics_rows(key, row["shard"], measured.parts))
    add_evidence(session, key, row["shard"], measured.lint)


def set_file_bytes(session: Session, key: StepKey, shard: int, file_bytes: int) -> None:
    """Record the size of a shard's token file, which was written again."""
    found = repository.find(session, key, shard)
    if found is not None:
        found.file_bytes = file_bytes


def replace_shards(session: Session, key: StepKey, measured: Sequence[tuple[int, MeasuredShard]]) -> None:
    """Replace the statistics and the evidence of shards, by number, that were measured again."""
    rows = [row for shard, found in measured for row in _statistics_rows(key, shard, found.parts)]
    repository.replace_statistics(session, key, rows)
    for shard, found in measured:
        replace_evidence(session, key, shard, found.lint)


def _present(key: StepKey, shards: Sequence[Stored]) -> list[Stored]:
    present = [shard for shard in shards if shard.tokens_removed is None]
    if shards and not present:
        raise TokensPurged(f"step {key.step} of attempt {key.attempt}: {removed_in_words(shards[0].tokens_removed)}")
    return present


def _statistics_rows(key: StepKey, shard: int, parts: Sequence[ShardPart]) -> list[dict[str, Any]]:
    return [
        {
            **key._asdict(),
            "shard": shard,
            "comparison": part.comparison,
            "statistics_version": part.statistics_version,
            "statistics": part.statistics,
            "summaries": part.summaries,
        }
        for part in parts
    ]
