"""Delete the rows of deleted runs, in transactions so short that uploads of other runs hardly wait.

A transaction deletes a few rows of one table; the tables come in the order in which their foreign keys allow it. The
files that a row names are given up in the transaction that deletes it, so an interruption at any point loses none of
them, and the next round continues. The run's own row stays: it is the tombstone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Table, delete, select, tuple_, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.dialect import table_of
from foreshock_service.platform.database.tables import Base, ExactShard, Lease, Probe, ProbeJob, Run, ScoreShard, Shard
from foreshock_service.platform.store.removals import give_up_files

# A transaction is aimed at this length: a small upload waits for one of them at most.
_TRANSACTION_SECONDS = 0.03
_FEWEST_ROWS, _MOST_ROWS = 20, 5_000
# A round of the periodic task; the next one continues.
_ROUND_SECONDS = 5.0
_logger = logging.getLogger(__name__)


def delete_rows_of_deleted_runs(
    context: ServiceContext, round_seconds: float = _ROUND_SECONDS, go_on: Callable[[], bool] = lambda: True
) -> bool:
    """Delete rows of deleted runs for about `round_seconds`, and return whether rows are left for the next call."""
    begin, deleted = time.monotonic(), 0
    with context.database.read() as session:
        runs = list(
            session.scalars(
                select(Run.id).where(Run.deleted_at_us.is_not(None), Run.rows_removed_at_us.is_(None)).order_by(Run.id)
            )
        )
    for run_id in runs:
        chunk = _MOST_ROWS // 20
        for table in _tables_of_runs():
            while True:
                # Each round deletes something, however long it looks for rows.
                if (deleted and time.monotonic() - begin > round_seconds) or not go_on():
                    return True
                started = time.monotonic()
                rows = context.database.write(partial(_delete_some, context, table, run_id, chunk))
                seconds = time.monotonic() - started
                deleted += rows
                if rows < chunk:
                    break
                chunk = min(max(int(chunk * _TRANSACTION_SECONDS / max(seconds, 1e-4)), _FEWEST_ROWS), _MOST_ROWS)
                # Leaves at least half of the writer's time to others.
                time.sleep(min(seconds, _TRANSACTION_SECONDS))
        context.database.write(partial(_finish, run_id))
        _logger.info("the rows of the deleted run %s are removed", run_id)
    return False


def _delete_some(context: ServiceContext, table: Table, run_id: str, limit: int, session: Session) -> int:
    """Delete up to `limit` rows of a table that belong to the run, give up their files, return the rows."""
    key = list(table.primary_key.columns)
    rows = select(*key).where(_of_run(table, run_id)).limit(limit)
    if table.name in _FILES_OF:
        columns = (table.c.file, table.c.file_bytes if "file_bytes" in table.c else table.c.body_bytes)
        chosen = session.execute(rows.add_columns(*columns)).all()
        give_up_files(
            session, [(row[-2], row[-1]) for row in chosen], "deletion", context.settings.removal_grace_seconds
        )
        if not chosen:
            return 0
    one = len(key) == 1
    statement = delete(table).where((key[0] if one else tuple_(*key)).in_(rows))
    return int(cast("CursorResult[Any]", session.execute(statement)).rowcount)


_FILES_OF = frozenset(table_of(each).name for each in (Shard, ScoreShard, ExactShard))


def _finish(run_id: str, session: Session) -> None:
    # The tombstone keeps the project and the key, which late uploads and the command line name.
    emptied = dict.fromkeys(("name", "model", "trainer", "engine", "hardware"))
    session.execute(update(Run).where(Run.id == run_id).values(rows_removed_at_us=now_us(), **emptied))


@cache
def _tables_of_runs() -> tuple[Table, ...]:
    """Return the tables with rows of runs, those first that others do not point at."""
    return tuple(_of_foreign_keys())


def _of_foreign_keys() -> Iterator[Table]:
    runs = table_of(Run)
    for table in reversed(Base.metadata.sorted_tables):
        # Rows that outlive their run, such as those of an audit, have no foreign key.
        if table is not runs and (_points_at(table, runs) or table.name in _BY_JOB):
            yield table


def _points_at(table: Table, runs: Table) -> bool:
    return "run_id" in table.c and bool(table.c.run_id.foreign_keys)


def _of_run(table: Table, run_id: str) -> ColumnElement[bool]:
    if "run_id" in table.c:
        return table.c.run_id == run_id
    return _BY_JOB[table.name](run_id)


def _jobs_of_run(run_id: str) -> Any:
    return select(ProbeJob.id).join(Probe, Probe.id == ProbeJob.probe_id).where(Probe.run_id == run_id)


def _of_job(column: ColumnElement[str]) -> Callable[[str], ColumnElement[bool]]:
    return lambda run_id: column.in_(_jobs_of_run(run_id))


# Tables that belong to a run by the job of a probe.
_BY_JOB: dict[str, Callable[[str], ColumnElement[bool]]] = {
    table_of(ProbeJob).name: lambda run_id: ProbeJob.probe_id.in_(select(Probe.id).where(Probe.run_id == run_id)),
    **{table_of(each).name: _of_job(table_of(each).c.job_id) for each in (Lease, ScoreShard, ExactShard)},
}
