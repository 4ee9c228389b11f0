"""Shards that another release measured, measured again from their tokens.

Statistics of two versions never mix, so the shards of a step must agree before they are folded. After an upgrade that
concerns the one step that was open then, or one that a late shard reaches; `foreshock remeasure` is for all others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock.errors import RolloutsError
from service.platform.context import ServiceContext
from service.platform.database.tables import Shard
from service.platform.decoding.pool import DecodersBusy
from service.runs.rollouts.service import replace_shards, shards_out_of_date
from service.runs.rollouts.shards import StoredShard, measure_stored
from service.runs.runs.service import lock_run_for_background
from service.runs.step_key import StepKey

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
        shards = shards_out_of_date(session, key)
    for shard in shards:
        try:
            measured = measure_file(context, TokenFile.of(shard))
        except DecodersBusy:
            raise
        except Exception:
            _logger.exception(
                "shard %s of step %s of run %s cannot be measured again", shard.shard, key.step, key.run_id
            )
            continue
        context.database.write(lambda session: _replace(session, key, shard, measured))  # noqa: B023


def _replace(session: Session, key: StepKey, shard: Shard, measured: StoredShard) -> None:
    if lock_run_for_background(session, key.run_id) is not None:
        replace_shards(session, key, [(shard.shard, measured)])
