"""Shards that another release measured, measured again from their tokens.

Statistics of two versions never mix, so the shards of a step must agree before they are folded. After an upgrade that
concerns the one step that was open then, or one that a late shard reaches; `foreshock remeasure` is for all others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from foreshock.errors import RolloutsError
from service.platform.context import ServiceContext
from service.platform.database.tables import Shard
from service.platform.decoding.pool import DecodersBusy
from service.runs.lint import repository as lint
from service.runs.lint.service import evidence_row
from service.runs.rollouts import repository
from service.runs.rollouts.shards import ShardPart, StoredShard, measure_stored
from service.runs.runs.repository import find_and_lock

StepKey = tuple[str, int, int]
"""(run, attempt, step)."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The file of a shard's tokens in the store, and what it has to hold."""

    shard: int
    name: str
    rollout_set_digest: str
    tokens: int

    @classmethod
    def of(cls, shard: Shard) -> TokenFile:
        """The file of a shard of the catalogue."""
        return cls(shard.shard, shard.file, shard.rollout_set_digest, shard.tokens)


def measure_file(context: ServiceContext, file: TokenFile) -> StoredShard:
    """What a token file gives now; raises RolloutsError, naming it, where it does not hold what was uploaded."""
    try:
        measured: StoredShard = context.decoders.run(measure_stored, context.store.path_of(file.name))
    except RolloutsError as error:
        raise RolloutsError(f"its token file {file.name} is damaged: {error}") from error
    if (measured.rollout_set_digest, measured.tokens) != (file.rollout_set_digest, file.tokens):
        raise RolloutsError(f"its token file {file.name} holds other rollouts than were uploaded")
    return measured


def bring_up_to_date(context: ServiceContext, key: StepKey) -> None:
    """Measure the step's shards again that are of another version; one that cannot be is logged, and stays as it is.

    Raises DecodersBusy, after which it is worth trying again.
    """
    with context.database.read() as session:
        shards = repository.out_of_date(session, *key)
    for shard in shards:
        try:
            measured = measure_file(context, TokenFile.of(shard))
        except DecodersBusy:
            raise
        except Exception:
            _logger.exception("shard %s of step %s of run %s cannot be measured again", shard.shard, key[2], key[0])
            continue
        context.database.write(lambda session: _replace(session, key, shard, measured))  # noqa: B023


def statistics_rows(key: StepKey, shard: int, parts: Sequence[ShardPart]) -> list[dict[str, Any]]:
    """What is stored of a shard's statistics: a row a comparison."""
    run_id, attempt, step = key
    return [
        {
            "run_id": run_id,
            "attempt": attempt,
            "step": step,
            "shard": shard,
            "comparison": part.comparison,
            "statistics_version": part.statistics_version,
            "statistics": part.statistics,
            "summaries": part.summaries,
        }
        for part in parts
    ]


def replace_shards(session: Session, key: StepKey, measured: Sequence[tuple[int, StoredShard]]) -> None:
    """Put what was measured of these shards, by their numbers, in the place of what is stored of them."""
    rows = [row for shard, found in measured for row in statistics_rows(key, shard, found.parts)]
    repository.replace_statistics(session, *key, rows)
    for shard, found in measured:
        lint.replace(session, evidence_row(key, shard, found.lint))


def _replace(session: Session, key: StepKey, shard: Shard, measured: StoredShard) -> None:
    run = find_and_lock(session, key[0])
    if run is not None and run.deleted_at_us is None:
        replace_shards(session, key, [(shard.shard, measured)])
