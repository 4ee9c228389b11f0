"""Carry out deletions of rollouts step by step: first write new files, then change the rows in one transaction a step.

Every file of a step that holds deleted rollouts is rewritten without them, under a new name. The transaction that names
the new files gives up the old ones, which are removed after the grace. Summaries keep their rows under pseudonyms,
since measures and intervals are computed from them; aggregates stay unchanged. After an interruption each step is
either unchanged or done, and at worst there are files that no row names.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import RolloutsError
from foreshock_service.maintenance import stored_files
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.decoding.pool import DecoderDied
from foreshock_service.platform.store.removal import check_not_taken, give_up_files
from foreshock_service.platform.store.tokens import StoredFile, exact_file_name, score_file_name, shard_file_name
from foreshock_service.replay.probes.service import cancel_jobs_of_step
from foreshock_service.runs import deletions, events, runs

_STEPS_AT_ONCE = 100
_ROUND_SECONDS = 20.0
_TRIES = 5
_REASON = "rollouts of its step were deleted: request a new probe"
_logger = logging.getLogger(__name__)

Found = TypeVar("Found")
ScoreRow = tables.ScoreShard | tables.ExactShard
SummariesRow = tables.ShardStatistics | tables.MeasurementStatistics


@dataclass(slots=True)
class StepRows:
    """The rows of a step that may hold deleted rollouts."""

    shards: list[tables.Shard]
    summaries: list[SummariesRow]
    scores: list[ScoreRow]

    @classmethod
    def read(cls, session: Session, key: events.StepKey) -> StepRows:
        """Read the rows of a step."""
        jobs = stored_files.jobs_of_step(key)
        shards = select(tables.Shard).where(engine.of_step(tables.Shard, key)).order_by(tables.Shard.shard)
        summaries: list[SummariesRow] = []
        for table in (tables.ShardStatistics, tables.MeasurementStatistics):
            summaries += session.scalars(select(table).where(engine.of_step(table, key), table.summaries.is_not(None)))
        scores: list[ScoreRow] = []
        for kind in (tables.ScoreShard, tables.ExactShard):
            scores += session.scalars(select(kind).where(kind.job_id.in_(jobs)).order_by(kind.file))
        return cls(list(session.scalars(shards)), summaries, scores)

    def version(self) -> tuple[frozenset[object], ...]:
        """Return a value that differs if the step has got other rows."""
        return (
            frozenset((row.shard, row.file, row.tokens_removed) for row in self.shards),
            frozenset((_place(row), hash(row.summaries)) for row in self.summaries),
            frozenset(row.file for row in self.scores),
        )


def _place(row: SummariesRow) -> tuple[int | None, str]:
    """Return the shard (None: the row is of the whole step) and the comparison of a row."""
    return getattr(row, "shard", None), row.comparison


@dataclass(slots=True)
class StepPlan:
    """The replacements of a step's rows; `files` by the old name."""

    version: tuple[frozenset[object], ...]
    deleted: frozenset[str] = frozenset()
    rollouts: int = 0
    files: dict[str, tuple[str, stored_files.StrippedFile]] = field(default_factory=dict)
    summaries: dict[tuple[int | None, str], bytes] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Return whether the step has no deleted rollouts."""
        return not (self.files or self.summaries)


def carry_out_deletions(
    context: ServiceContext, round_seconds: float = _ROUND_SECONDS, go_on: Callable[[], bool] = lambda: True
) -> bool:
    """Search steps for about `round_seconds`; return whether steps are left for the next call.

    A deletion that fails is left for the next call. The others are carried out; then the first error is raised.
    """
    end = time.monotonic() + round_seconds
    with context.database.read() as session:
        pending = session.scalars(
            select(tables.Deletion)
            .where(tables.Deletion.finished_at_us.is_(None))
            .order_by(tables.Deletion.requested_at_us)
        ).all()
    errors: list[Exception] = []
    for deletion in pending:
        try:
            if _carry_out(context, deletion, lambda: time.monotonic() <= end and go_on()):
                return True
        except Exception as error:
            _logger.exception("the deletion %s of rollouts of run %s failed", deletion.id, deletion.run_id)
            errors.append(error)
    if errors:
        raise errors[0]
    return False


def _carry_out(context: ServiceContext, deletion: tables.Deletion, go_on: Callable[[], bool]) -> bool:
    """Search the steps that a deletion has not reached; return whether some are left."""
    ids = deletions.DeletedIds(deletion.run_id, frozenset(deletion.sample_digests), frozenset(deletion.group_digests))
    place = (deletion.attempt, deletion.step)
    while True:
        with context.database.read() as session:
            steps = stored_files.steps_beyond(session, deletion.run_id, place, _STEPS_AT_ONCE)
        if not steps:
            return not context.database.write(partial(_finish, deletion.id, place))
        for key in steps:
            plan = strip_step(context, key, ids)
            context.database.write(partial(_advance, deletion.id, place, key, plan))
            place = (key.attempt, key.step)
            if not go_on():
                return True


def strip_step(
    context: ServiceContext, key: events.StepKey, ids: deletions.DeletedIds, *, dry_run: bool = False
) -> StepPlan:
    """Take the deleted rollouts out of a step; return what was replaced, or would be."""
    for _ in range(_TRIES):
        with context.database.read() as session:
            rows = StepRows.read(session, key)
        plan = _plan(context, key, ids, rows, dry_run=dry_run)
        if plan.is_empty or dry_run or context.database.write(partial(_replace, context, key, plan)):
            return plan
        for name, stripped in plan.files.values():
            if stripped.rollouts:
                context.store.remove(name)
    raise RuntimeError(f"step {key.step} of run {key.run_id} kept changing while its rollouts were deleted")


def _plan(
    context: ServiceContext, key: events.StepKey, ids: deletions.DeletedIds, rows: StepRows, *, dry_run: bool
) -> StepPlan:
    plan = StepPlan(rows.version())
    deleted: set[str] = set()
    kept: set[str] = set()
    touched: list[tuple[tables.Shard, int]] = []
    for shard in rows.shards:
        if shard.tokens_removed is not None:
            continue
        found = _read(context, shard.file, stored_files.find_rollouts, ids)
        if found is None:
            continue
        kept.update(found.kept)
        if found.deleted:
            deleted.update(found.deleted)
            touched.append((shard, len(found.deleted)))
    secret = secrets.token_bytes(16)
    for part in rows.summaries:
        assert part.summaries is not None
        changed = context.decoders.run(stored_files.anonymise_summaries, part.summaries, ids, secret)
        if changed is not None:
            # The summaries of a step of one shard are stored with the step only.
            deleted |= changed[0]
            plan.summaries[_place(part)] = changed[1]
    plan.deleted = frozenset(deleted)
    for shard, number in touched:
        name = shard_file_name(key.run_id, key.attempt, key.step, shard.shard, shard.digest)
        strip = partial(stored_files.strip_rollouts, ids=ids, sampled=shard.sampled_rollouts)
        stripped = _rewrite(context, shard.file, name, strip, dry_run=dry_run)
        if stripped is not None:
            plan.files[shard.file] = (name, stripped)
            plan.rollouts += number
    for row in rows.scores if touched else ():
        if row.file in plan.files:
            continue
        exact = isinstance(row, tables.ExactShard)
        make = exact_file_name if exact else score_file_name
        name = make(key.run_id, key.attempt, key.step, row.job_id, row.digest)
        strip = partial(stored_files.strip_scores, kept=frozenset(kept), exact=exact)
        stripped = _rewrite(context, row.file, name, strip, dry_run=dry_run)
        if stripped is not None:
            plan.files[row.file] = (name, stripped)
    return plan


def _read(context: ServiceContext, name: str, read: Callable[..., Found], *arguments: Any) -> Found | None:
    """Return `read(file, *arguments)` of a stored file, run in a decoder; None if the file is gone or damaged.

    If a shard's bytes are sent again, its file is restored and the step is searched again.
    """
    try:
        return context.decoders.run(read, context.store.file(name), *arguments)
    except (FileNotFoundError, RolloutsError, DecoderDied) as error:
        _logger.warning("%s is gone or damaged: no rollout of it can be deleted (%s)", name, error)
        return None


def _rewrite(
    context: ServiceContext,
    old: str,
    name: str,
    strip: Callable[[StoredFile, Path], stored_files.StrippedFile],
    *,
    dry_run: bool,
) -> stored_files.StrippedFile | None:
    temporary = context.store.temporary_file()
    try:
        stripped = _read(context, old, strip, temporary)
        if stripped is not None and stripped.rollouts and not dry_run:
            context.store.publish(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    return stripped


def _replace(context: ServiceContext, key: events.StepKey, plan: StepPlan, session: Session) -> bool:
    """Replace the rows in this transaction; False if they have changed since the plan was made."""
    if runs.lock_run_for_background(session, key.run_id) is None:
        return True
    rows = StepRows.read(session, key)
    if rows.version() != plan.version:
        return False
    check_not_taken(session, [name for name, stripped in plan.files.values() if stripped.rollouts])
    now, given_up = now_us(), []
    step = session.get(tables.Step, tuple(key))
    for shard in rows.shards:
        if shard.file not in plan.files:
            continue
        name, stripped = plan.files[shard.file]
        given_up.append((shard.file, shard.file_bytes))
        before = shard.rollouts if shard.full_rollouts is None else shard.full_rollouts
        tokens = shard.tokens if shard.full_tokens is None else shard.full_tokens
        if step is not None:
            full = step.rollouts if step.full_rollouts is None else step.full_rollouts
            step.full_rollouts = full - before + stripped.rollouts
            full = step.tokens if step.full_tokens is None else step.full_tokens
            step.full_tokens = full - tokens + stripped.tokens
        shard.deleted_rollouts = (shard.deleted_rollouts or 0) + before - stripped.rollouts
        shard.full_rollouts, shard.full_tokens = stripped.rollouts, stripped.tokens
        shard.sampled_rollouts, shard.tokens_changed_at_us = stripped.sampled, now
        if stripped.rollouts:
            shard.file, shard.file_bytes = name, stripped.file_bytes
        else:
            shard.tokens_removed = "deletion"
    for row in rows.scores:
        if row.file in plan.files:
            name, stripped = plan.files[row.file]
            given_up.append((row.file, row.body_bytes))
            if stripped.rollouts:
                row.file, row.rollouts, row.tokens = name, stripped.rollouts, stripped.tokens
            else:
                session.delete(row)
    for part in rows.summaries:
        part.summaries = plan.summaries.get(_place(part), part.summaries)
    for evidence in session.scalars(select(tables.ShardLint).where(engine.of_step(tables.ShardLint, key))):
        evidence.examples = stored_files.strip_examples(evidence.examples, plan.deleted)
    verdict = session.get(tables.StepLint, tuple(key))
    if verdict is not None:
        verdict.report = stored_files.strip_report(verdict.report, plan.deleted)
    for result in session.scalars(select(tables.ProbeResult).where(engine.of_step(tables.ProbeResult, key))):
        result.document = stored_files.strip_document(result.document, plan.deleted)
    give_up_files(session, given_up, "deletion", context.settings.removal_grace_seconds)
    cancel_jobs_of_step(session, key, _REASON)
    return True


def _advance(deletion_id: str, place: tuple[int, int], key: events.StepKey, plan: StepPlan, session: Session) -> None:
    deletion = session.get(tables.Deletion, deletion_id, with_for_update=True)
    if deletion is None:
        return
    if not plan.is_empty:
        deletion.steps += 1
        deletion.rollouts += plan.rollouts
        deletion.files += len(plan.files)
    # A shard that arrived meanwhile may have moved the place back.
    if (deletion.attempt, deletion.step) == place:
        deletion.attempt, deletion.step = key.attempt, key.step


def _finish(deletion_id: str, place: tuple[int, int], session: Session) -> bool:
    """Mark the deletion as finished; False if a step has to be searched again."""
    deletion = session.get(tables.Deletion, deletion_id, with_for_update=True)
    if deletion is None:
        return True
    if (deletion.attempt, deletion.step) != place:
        return False
    deletion.finished_at_us = now_us()
    return True
