"""Stored shards of rollouts: their catalogue rows, statistics and evidence of the lint; and the steps that they close.

Statistics of two versions never merge, so all shards of a step must have one version before they are folded. After an
upgrade, shards are measured again if their step was open or gets a late shard; `foreshock remeasure` is for all others.

A step of one shard is folded by the decoder and closed by the transaction that commits the shard. Any other step is
folded when its run is advanced (`watch/advance.py`), outside the writer and the run's lock, from a snapshot of its
shards' statistics. The transaction that stores the fold locks the run and checks that the step still has these shards;
if not, it is folded again. A late shard re-folds a closed step in the same way. Until the fold is stored,
`steps.folded_shards` is below `steps.received_shards`.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from foreshock import comparisons, errors
from foreshock.clock import now_us
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.statistics_shards import ShardPart
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import insert_rows, of_step
from foreshock_service.platform.database.tables import MeasurementStatistics, Shard, ShardStatistics, Step
from foreshock_service.platform.decoding.pool import DecodersBusy
from foreshock_service.platform.problem import TokensPurged
from foreshock_service.runs import events, judging, lint, runs, steps
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.measurements import has_measurement, store_measurements
from foreshock_service.runs.shard_decoding import FoldedStep, MeasuredShard, fold_step, measure_stored

ShardVersions = frozenset[tuple[int, int]]
"""(shard, version of its statistics): equal for two reads of a step unless a shard was added or measured again."""

# The comparisons of a shard; a step also has those of its probes.
_OF_SHARDS = (comparisons.STEP_ROW, comparisons.TRAINER_ROLLOUT)
_logger = logging.getLogger(__name__)
PURGED = "tokens purged by retention"


def find_shard(session: Session, key: events.StepKey, shard: int) -> Shard | None:
    return session.get(Shard, (*key, shard))


def shards_of_step(session: Session, key: events.StepKey) -> Sequence[Shard]:
    return session.scalars(select(Shard).filter_by(**key._asdict()).order_by(Shard.shard)).all()


def shards_with_tokens(session: Session, key: events.StepKey) -> list[Shard]:
    """Return the catalogue rows of the shards of a step whose tokens are stored, in order.

    Raises TokensPurged if retention purged the tokens of all its shards.
    """
    shards = shards_of_step(session, key)
    present = [shard for shard in shards if shard.tokens_purged_at_us is None]
    if shards and not present:
        raise TokensPurged(f"step {key.step} of attempt {key.attempt}: {PURGED}")
    return present


def statistics_of_step(session: Session, key: events.StepKey) -> list[ShardPart]:
    """Return the statistics of a step's shards, by comparison and then in the order of shards."""
    own, whole = ShardStatistics, MeasurementStatistics
    query = select(own.comparison, own.statistics_version, own.statistics, own.summaries)
    query = query.where(of_step(own, key)).order_by(own.comparison, own.shard)
    parts = [ShardPart(*row) for row in session.execute(query)]
    columns = (whole.comparison, whole.statistics_version, whole.statistics, whole.summaries)
    return parts or [ShardPart(*row) for row in session.execute(_of_whole_step(key, *columns))]


def shard_versions(session: Session, key: events.StepKey) -> ShardVersions:
    """Return the shards of a step and the version of each one's statistics."""
    own = select(ShardStatistics.shard, ShardStatistics.statistics_version).filter_by(**key._asdict())
    found = frozenset((shard, version) for shard, version in session.execute(own))
    whole = _of_whole_step(key, MeasurementStatistics.statistics_version)
    return found or frozenset((0, version) for version in session.scalars(whole))


def _of_whole_step(key: events.StepKey, *columns: Any) -> Select[Any]:
    """Return the query for the statistics of a step's only shard, stored with the step; empty for other steps."""
    whole = MeasurementStatistics
    query = select(*columns).filter_by(**key._asdict())
    query = query.join(Step, of_step(Step, whole))
    return query.where(Step.expected_shards == 1, whole.comparison.in_(_OF_SHARDS)).order_by(whole.comparison)


def add_shard(session: Session, shard: Shard, measured: MeasuredShard, *, is_whole_step: bool) -> None:
    """Add a shard: its catalogue row (the commit point of an upload), its statistics and its evidence.

    `is_whole_step`: the same transaction stores the step's measurements, which hold the same statistics.
    """
    key = events.StepKey(shard.run_id, shard.attempt, shard.step)
    session.add(shard)
    session.flush()
    if not is_whole_step:
        insert_rows(session, ShardStatistics, _statistics_rows(key, shard.shard, measured))
    lint.store_evidence(session, key, shard.shard, measured.lint)


def replace_shards(session: Session, key: events.StepKey, measured: Iterable[tuple[int, MeasuredShard]]) -> None:
    """Replace the statistics and the evidence of shards, by number, that were measured again."""
    if runs.lock_run_for_background(session, key.run_id) is None:
        return
    for shard, found in measured:
        session.execute(delete(ShardStatistics).filter_by(**key._asdict(), shard=shard))
        insert_rows(session, ShardStatistics, _statistics_rows(key, shard, found))
        lint.store_evidence(session, key, shard, found.lint)


def _statistics_rows(key: events.StepKey, shard: int, measured: MeasuredShard) -> list[dict[str, Any]]:
    return [{**key._asdict(), "shard": shard, **asdict(part)} for part in measured.parts]


def measure_again(context: ServiceContext, shard: Shard) -> MeasuredShard:
    """Measure the token file of a shard again.

    Raises RolloutsError, naming the file, if its contents differ from the upload; also if its tokens were
    purged, or if it was sent as statistics, because not all of its tokens are stored.
    """
    if shard.tokens_purged_at_us is not None:
        raise errors.RolloutsError(f"shard {shard.shard} cannot be measured again: {PURGED}; its measures stay")
    if shard.full_rollouts is not None:
        raise errors.RolloutsError(
            f"shard {shard.shard} was sent as statistics and cannot be measured again: {shard.full_rollouts:,} of its "
            f"{shard.rollouts:,} rollouts are stored in full"
        )
    try:
        measured: MeasuredShard = context.decoders.run(measure_stored, context.store.file(shard.file))
    except errors.RolloutsError as error:
        raise errors.RolloutsError(f"its token file {shard.file} is damaged: {error}") from error
    if (measured.rollout_set_digest, measured.tokens) != (shard.rollout_set_digest, shard.tokens):
        raise errors.RolloutsError(f"its token file {shard.file} holds other rollouts than were uploaded")
    return measured


def bring_up_to_date(context: ServiceContext, key: events.StepKey) -> None:
    """Measure the step's shards of another version again; one that cannot be measured is logged and left unchanged.

    Raises DecodersBusy, after which a retry may succeed.
    """
    with context.database.read() as session:
        other = {shard for shard, version in shard_versions(session, key) if version != STATISTICS_VERSION}
        shards = [shard for shard in shards_of_step(session, key) if shard.shard in other] if other else []
    for shard in shards:
        try:
            measured = measure_again(context, shard)
        except DecodersBusy:
            raise
        except Exception:
            _logger.exception(
                "shard %s of step %s of run %s cannot be measured again", shard.shard, key.step, key.run_id
            )
            continue
        context.database.write(partial(replace_shards, key=key, measured=[(shard.shard, measured)]))


def store_fold(session: Session, key: events.StepKey, folded: FoldedStep, *, again: bool = False) -> None:
    """Store the fold of a step, which was closed before if `again`. The run is locked."""
    # A fold of some shards (the others have another statistics version) never replaces a fold of all.
    kept = [
        each
        for each in folded.measurements
        if not each.from_sample or not has_measurement(session, key, each.comparison)
    ]
    store_measurements(session, key, kept)
    if folded.verdict is not None:
        lint.store_verdict(session, key, folded.verdict, again=again)
    steps.mark_step(session, key)


def mark_closed(step: Step) -> None:
    step.closed_at_us = step.closed_at_us or now_us()
    step.folded_shards = step.received_shards


def grace_us(context: ServiceContext) -> int:
    return int(context.settings.step_grace_seconds * 1e6)


def close_step(context: ServiceContext, key: events.StepKey) -> bool:
    """Fold the step's shards and close it; return False after an error, which leaves its shards stored.

    It stays as it is if a shard arrives meanwhile. The caller is the only one that folds steps of this run.
    """
    with RunIsolated(context.database, context.events, key.run_id, f"close its step {key.step}"):
        bring_up_to_date(context, key)
        with context.database.read() as session:
            versions, folded = _fold(session, key)
        context.database.write(partial(_store, context, key, versions, folded))
        return True
    return False


def _fold(session: Session, key: events.StepKey) -> tuple[ShardVersions, FoldedStep]:
    """Return the fold of a step, and the shards that it was computed from."""
    versions, measurements = shard_versions(session, key), fold_step(statistics_of_step(session, key))
    for each in measurements:
        if each.from_sample:
            _logger.warning(
                "%s of step %s of attempt %s of run %s includes only some shards, because another release measured the "
                "others: run `foreshock remeasure`",
                *(each.comparison, key.step, key.attempt, key.run_id),
            )
    verdict = judging.judge_step(key.step, key.attempt, lint.evidence_of_step(session, key))
    return versions, FoldedStep(measurements, verdict)


def _store(
    context: ServiceContext, key: events.StepKey, versions: ShardVersions, folded: FoldedStep, session: Session
) -> None:
    """Store the fold and close the step, unless it has other shards now or its run was deleted."""
    run, step = runs.lock_run_for_background(session, key.run_id), steps.find_step(session, key)
    if run is None or step is None or shard_versions(session, key) != versions:
        return
    if step.folded_shards < step.received_shards:
        again = step.closed_at_us is not None
        mark_closed(step)
        store_fold(session, key, folded, again=again)
        session.flush()
        context.events.publish(session, events.StepClosed(*key))
