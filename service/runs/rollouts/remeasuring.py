"""Measure the tokens of stored shards again.

Statistics of two versions never merge, so the shards of a step must agree before they are folded. After an upgrade that
concerns the one step that was open then, or one that a late shard reaches; `foreshock remeasure` is for all others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from sqlalchemy.orm import Session

from foreshock.errors import RolloutsError
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.pool import DecodersBusy
from foreshock_service.runs.rollouts.service import removed_in_words, replace_shards, shards_out_of_date
from foreshock_service.runs.rollouts.shards import MeasuredShard, measure_stored
from foreshock_service.runs.runs.service import lock_run_for_background
from foreshock_service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Token file of a shard in the store, and its expected contents."""

    shard: int
    name: str
    rollout_set_digest: str
    tokens: int
    rollouts: int
    full_rollouts: int | None = None
    tokens_removed: str | None = None
    deleted_rollouts: int | None = None

    @classmethod
    def of(cls, shard: Shard) -> TokenFile:
        """Return the file of a shard of the catalogue."""
        return cls(
            shard.shard, shard.file, shard.rollout_set_digest, shard.tokens, shard.rollouts, shard.full_rollouts,
            shard.tokens_removed, shard.deleted_rollouts,
        )  # fmt: skip

    def removed_in_words(self) -> str | None:
        """Return why not all tokens that were uploaded are stored; None if they are."""
        if self.tokens_removed is not None:
            return removed_in_words(self.tokens_removed)
        if self.deleted_rollouts:
            return f"{self.deleted_rollouts:,} of its {self.rollouts:,} rollouts were deleted"
        return None


def measure_file(context: ServiceContext, file: TokenFile) -> MeasuredShard:
    """Measure a token file again.

    Raises RolloutsError, naming the file, if its contents differ from the upload, or if the shard was sent as
    statistics or lost rollouts to retention or a deletion: the tokens that the statistics are of are not stored.
    """
    removed = file.removed_in_words()
    if removed is not None:
        raise RolloutsError(f"shard {file.shard} cannot be measured again: {removed}; its measures stay")
    if file.full_rollouts is not None:
        raise RolloutsError(
            f"shard {file.shard} was sent as statistics and cannot be measured again: {file.full_rollouts:,} of its "
            f"{file.rollouts:,} rollouts are stored in full"
        )
    try:
        measured: MeasuredShard = context.decoders.run(measure_stored, context.store.file(file.name))
    except RolloutsError as error:
        raise RolloutsError(f"its token file {file.name} is damaged: {error}") from error
    if (measured.rollout_set_digest, measured.tokens) != (file.rollout_set_digest, file.tokens):
        raise RolloutsError(f"its token file {file.name} holds other rollouts than were uploaded")
    return measured


_logger = logging.getLogger(__name__)


def bring_up_to_date(context: ServiceContext, key: StepKey) -> None:
    """Measure the step's shards of another version again; one that cannot be measured is logged and left unchanged.

    Raises DecodersBusy, after which a retry may succeed.
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
        context.database.write(partial(_replace, key, shard.shard, measured))


def _replace(key: StepKey, shard: int, measured: MeasuredShard, session: Session) -> None:
    if lock_run_for_background(session, key.run_id) is not None:
        replace_shards(session, key, [(shard, measured)])
