"""`foreshock delete` on the database and the token store that the settings name."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock_service.maintenance.command_context import maintenance_context, run_called
from foreshock_service.maintenance.deletion.rollouts import carry_out_deletions, steps_beyond, strip_step
from foreshock_service.maintenance.deletion.runs import delete_rows_of_deleted_runs
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Shard, Step
from foreshock_service.platform.events import EventBus
from foreshock_service.platform.keys import Scope
from foreshock_service.platform.security import Principal
from foreshock_service.platform.settings import load_settings
from foreshock_service.replay.probes.service import cancel_jobs_of_run
from foreshock_service.runs.deletions import DeletedIds, DeletionCreate, store_deletion
from foreshock_service.runs.events import RunRemoved
from foreshock_service.runs.runs.service import delete_run


@dataclass(frozen=True, slots=True)
class OperatorPrincipal(Principal):
    """An operator at the console, who may do everything."""

    @property
    def actor(self) -> str:
        """Return the operator's name, for the audit."""
        return f"console:{getpass.getuser()}"


def operator() -> Principal:
    """Return the operator who runs this process."""
    return OperatorPrincipal(None, None, frozenset(Scope))


def delete_whole_run(run: str, *, dry_run: bool) -> None:
    """Delete a run by id, key or name; print what is deleted, or would be."""
    with maintenance_context(load_settings()) as context:
        with context.database.read() as session:
            found = run_called(session, run)
            steps = session.scalar(select(func.count()).select_from(Step).where(Step.run_id == found.id)) or 0
            files, size = _files(session, found.id)
        extent = (
            f"run {found.id} ({found.project}/{found.key}): {steps} steps, {files} token files, {size / 1e6:,.1f} MB"
        )
        if dry_run:
            print(f"{extent} would be deleted; nothing was changed")
            return
        events = EventBus()
        events.subscribe(RunRemoved, cancel_jobs_of_run)
        context.database.write(lambda session: delete_run(session, events, operator(), found.id))
        while delete_rows_of_deleted_runs(context):
            pass
        print(f"{extent} deleted; {_when(context)}")


def delete_rollouts(run: str, sample_ids: Sequence[str], group_ids: Sequence[str], *, dry_run: bool) -> None:
    """Delete rollouts of a run by their ids; print what is deleted, or would be."""
    with maintenance_context(load_settings()) as context:
        with context.database.read() as session:
            found = run_called(session, run)
        if dry_run:
            rollouts, steps, files = _count(context, found.id, sample_ids, group_ids)
            print(f"{rollouts} rollouts of {steps} steps in {files} files would be deleted; nothing was changed")
            return
        body = DeletionCreate(sample_ids=list(sample_ids), group_ids=list(group_ids))
        made = context.database.write(lambda session: store_deletion(session, operator(), found.id, body))
        while carry_out_deletions(context):
            pass
        with context.database.read() as session:
            done = session.get_one(type(made), made.id)
        print(f"{done.rollouts} rollouts of {done.steps} steps in {done.files} files deleted; {_when(context)}")


def _count(
    context: ServiceContext, run_id: str, sample_ids: Sequence[str], group_ids: Sequence[str]
) -> tuple[int, int, int]:
    ids = DeletedIds.of(run_id, sample_ids, group_ids)
    rollouts = steps = files = 0
    place = (0, -1)
    while True:
        with context.database.read() as session:
            keys = steps_beyond(session, run_id, place)
        if not keys:
            return rollouts, steps, files
        for key in keys:
            plan = strip_step(context, key, ids, dry_run=True)
            rollouts, steps, files = rollouts + plan.rollouts, steps + (not plan.is_empty), files + len(plan.files)
            place = (key.attempt, key.step)


def _files(session: Session, run_id: str) -> tuple[int, int]:
    query = select(func.count(), func.coalesce(func.sum(Shard.file_bytes), 0))
    count, size = session.execute(query.where(Shard.run_id == run_id, Shard.tokens_removed.is_(None))).one()
    return int(count), int(size)


def _when(context: ServiceContext) -> str:
    return f"the service removes the files after {context.settings.removal_grace_seconds / 3600:g} h"
