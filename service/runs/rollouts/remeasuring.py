"""Measure the shards of one step again that another release measured.

Statistics of two versions never merge, so the shards of a step must agree before they are folded. After an upgrade that
concerns the one step that was open then, or one that a late shard reaches; `foreshock remeasure` is for all others.
"""

from __future__ import annotations

import logging
from functools import partial

from sqlalchemy.orm import Session

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.decoding.pool import DecodersBusy
from foreshock_service.runs.rollouts.service import replace_shards, shards_out_of_date
from foreshock_service.runs.rollouts.shards import MeasuredShard
from foreshock_service.runs.rollouts.token_files import TokenFile, measure_file
from foreshock_service.runs.runs.service import lock_run_for_background
from foreshock_service.runs.step_key import StepKey

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
