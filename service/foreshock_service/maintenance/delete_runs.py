"""`foreshock delete`, and the removal of deleted runs' rows in transactions so short that uploads hardly wait.

Each transaction deletes a few rows of one table, in the order of tables that foreign keys allow. It also gives up the
files that these rows name, so an interruption at any point loses no file, and the next round continues. The run's own
row stays as the tombstone.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Table, delete, func, select, tuple_, update
from sqlalchemy.orm import Session

from foreshock import clock
from foreshock_service.maintenance.stored_files import maintenance_context, run_called
from foreshock_service.platform import audit, security, settings
from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.store.removal import give_up_files
from foreshock_service.replay.probes import jobs, service
from foreshock_service.runs.events import RunRemoved
from foreshock_service.runs.runs import delete_run

# Rows of a transaction, which takes milliseconds: a small upload waits for at most one of them.
_ROWS_AT_ONCE = 250
# A round of the periodic task; the next one continues.
_ROUND_SECONDS = 5.0
_logger = logging.getLogger(__name__)


def delete_rows_of_deleted_runs(
    context: ServiceContext, round_seconds: float = _ROUND_SECONDS, go_on: Callable[[], bool] = lambda: True
) -> bool:
    """Delete rows of deleted runs for about `round_seconds`, and return whether rows are left for the next call."""
    begin, deleted = time.monotonic(), 0
    with context.database.read() as session:
        query = select(tables.Run.id).where(tables.Run.deleted_at_us.is_not(None))
        runs = session.scalars(query.where(tables.Run.rows_removed_at_us.is_(None)).order_by(tables.Run.id)).all()
    for run_id in runs:
        for table in _tables_of_runs():
            rows = _ROWS_AT_ONCE
            while rows == _ROWS_AT_ONCE:
                # Each round deletes something, even if it takes long to find rows.
                if (deleted and time.monotonic() - begin > round_seconds) or not go_on():
                    return True
                started = time.monotonic()
                rows = context.database.write(partial(_delete_some, context, table, run_id))
                deleted += rows
                # Leaves at least half of the writer's time to others.
                time.sleep(time.monotonic() - started if rows else 0.0)
        context.database.write(partial(_finish, run_id))
        _logger.info("the rows of the deleted run %s are removed", run_id)
    return False


def _delete_some(context: ServiceContext, table: Table, run_id: str, session: Session) -> int:
    """Delete some rows of a table that belong to the run, give up their files, return the number of rows."""
    key = list(table.primary_key.columns)
    rows = select(*key).where(_of_run(table, run_id)).limit(_ROWS_AT_ONCE)
    if "file" in table.c:
        # Ordered, so that exactly the rows are deleted whose files are given up.
        rows = rows.order_by(*key)
        columns = (table.c.file, table.c.file_bytes if "file_bytes" in table.c else table.c.body_bytes)
        chosen = session.execute(rows.add_columns(*columns)).all()
        give_up_files(
            session, [(row[-2], row[-1]) for row in chosen], "deletion", context.settings.removal_grace_seconds
        )
        if not chosen:
            return 0
    one = len(key) == 1
    statement = delete(table).where((key[0] if one else tuple_(*key)).in_(rows))
    if table is engine.table_of(tables.Lease):
        ended = session.execute(statement.returning(table.c.outcome, table.c.accelerator)).all()
        _keep_failures(session, run_id, Counter(row.accelerator for row in ended if row.outcome in jobs.FAILURES))
        return len(ended)
    return int(cast("CursorResult[Any]", session.execute(statement)).rowcount)


def _keep_failures(session: Session, run_id: str, tries: Mapping[str, int]) -> None:
    """Add failed tries, by accelerator, to those of removed runs."""
    project = session.scalars(select(tables.Run.project).where(tables.Run.id == run_id)).one()
    for accelerator, count in tries.items():
        key = {"project": project, "accelerator": accelerator}
        engine.insert_if_absent(session, tables.RemovedFailures, key | {"tries": 0})
        same = (tables.RemovedFailures.project == project, tables.RemovedFailures.accelerator == accelerator)
        session.execute(update(tables.RemovedFailures).where(*same).values(tries=tables.RemovedFailures.tries + count))


def _finish(run_id: str, session: Session) -> None:
    # The tombstone keeps the project and the key, which late uploads and the command line name.
    emptied = dict.fromkeys(("name", "model", "trainer", "engine", "hardware"))
    session.execute(
        update(tables.Run).where(tables.Run.id == run_id).values(rows_removed_at_us=clock.now_us(), **emptied)
    )


def _tables_of_runs() -> list[Table]:
    """Return the tables with rows of runs; a table comes after those that point at it."""
    runs = engine.table_of(tables.Run)
    return [
        table
        for table in reversed(tables.Base.metadata.sorted_tables)
        # Rows that outlive their run have no foreign key.
        if table is not runs and any(table.c[name].foreign_keys for name in _OWNERS if name in table.c)
    ]


# Columns that link a row to a run: directly, by its job, or by its probe.
_OWNERS = ("run_id", "job_id", "probe_id")


def _of_run(table: Table, run_id: str) -> ColumnElement[bool]:
    if "run_id" in table.c:
        return table.c.run_id == run_id
    probes = select(tables.Probe.id).where(tables.Probe.run_id == run_id)
    if "probe_id" in table.c:
        return table.c.probe_id.in_(probes)
    return table.c.job_id.in_(select(tables.ProbeJob.id).where(tables.ProbeJob.probe_id.in_(probes)))


def delete_whole_run(run: str, *, dry_run: bool) -> None:
    """Delete a run by id, key or name; print what is deleted, or would be."""
    with maintenance_context(settings.load_settings()) as context:
        with context.database.read() as session:
            found = run_called(session, run)
            steps = session.scalar(select(func.count(tables.Step.step)).where(tables.Step.run_id == found.id)) or 0
            shards = select(func.count(), func.coalesce(func.sum(tables.Shard.file_bytes), 0))
            whole = (tables.Shard.run_id == found.id, tables.Shard.tokens_purged_at_us.is_(None))
            files, size = session.execute(shards.where(*whole)).one()
        what = f"run {found.id} ({found.project}/{found.key})"
        extent = f"{what}: {steps} steps, {files} token files, {int(size) / 1e6:,.1f} MB"
        if dry_run:
            print(f"{extent} would be deleted; nothing was changed")
            return
        events = EventBus()
        events.subscribe(RunRemoved, service.cancel_jobs_of_run)
        with audit.on_stderr(context.settings.log_format):
            context.database.write(lambda session: delete_run(session, events, security.operator(), found.id))
        while delete_rows_of_deleted_runs(context):
            pass
        hours = context.settings.removal_grace_seconds / 3600
        print(f"{extent} deleted; the service removes the files after {hours:g} h")
