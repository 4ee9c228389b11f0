"""Runs of many steps, made by copying the rows of a short run that was really ingested.

`copy_run` repeats the steps of a template: the number of a step and its file names are set, the rest is as it was
ingested. Then it publishes that the step has closed, from which detector snapshots, alerts and decisions follow as they
do at ingestion. `comparable` returns a run's rows without ids and times, so that a copy can be compared with a run that
was ingested.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from sqlalchemy import Table, select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database import tables
from foreshock_service.platform.database.engine import insert_rows, table_of
from foreshock_service.platform.database.session import Database
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.steps import mark_step

# In an order in which rows may be inserted: those that others refer to come first.
COPIED: tuple[Table, ...] = (
    table_of(tables.Step), table_of(tables.Shard), table_of(tables.ShardStatistics), table_of(tables.ShardLint),
    tables.measurements, table_of(tables.MeasurementStatistics), table_of(tables.StepLint), table_of(tables.Scalar),
)  # fmt: skip
DERIVED: tuple[Table, ...] = (
    table_of(tables.DetectorSnapshot),
    table_of(tables.Alert),
    table_of(tables.AdviceDecision),
)

STEPS_AT_ONCE = 500
# The history has the scalars of a step when it closes; ingestion got them afterwards, which changes an alert twice.
_OWN = frozenset({"id", "run_id", "file", "version", "decision", "identity"})


def copy_run(database: Database, template: str, period: int, run: str, steps: int) -> None:
    """Give `run` the steps 0 … `steps` − 1: those of the first `period` steps of `template`, over and over."""
    with database.read() as session:
        rows = {table.name: _rows(session, table, template, period) for table in COPIED}
    for first in range(0, steps, STEPS_AT_ONCE):
        numbers = range(first, min(first + STEPS_AT_ONCE, steps))
        database.write(partial(_add_steps, rows, period, run, numbers))


def comparable(database: Database, run: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a run by table, without ids, times and file names."""
    found = {}
    with database.read() as session:
        for table in (*COPIED, *DERIVED):
            rows = [dict(row) for row in session.execute(select(table).where(table.c.run_id == run)).mappings()]
            stripped = [
                {name: value for name, value in row.items() if name not in _OWN and not name.endswith("_us")}
                for row in rows
            ]
            found[table.name] = sorted(stripped, key=lambda row: repr([row.get(name) for name in _KEYS]))
    return found


_KEYS = ("attempt", "step", "shard", "comparison", "source", "name", "rule", "revision")


def _rows(session: Session, table: Table, run: str, period: int) -> dict[int, list[dict[str, Any]]]:
    query = select(table).where(table.c.run_id == run, table.c.step < period)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in session.execute(query).mappings():
        by_step.setdefault(row["step"], []).append(dict(row))
    return by_step


def _add_steps(
    rows: Mapping[str, Mapping[int, list[dict[str, Any]]]], period: int, run: str, steps: range, session: Session
) -> None:
    # A run without a step of rollouts is watched by its scalars.
    session.execute(update(tables.Run).where(tables.Run.id == run).values(last_step=steps[-1]))
    for step in steps:
        for table in COPIED:
            insert_rows(session, table, [_copy(row, run, step) for row in rows[table.name].get(step % period, ())])
        mark_step(session, StepKey(run, 1, step))


def _copy(row: Mapping[str, Any], run: str, step: int) -> dict[str, Any]:
    copy = {**row, "run_id": run, "step": step}
    if "file" in row:
        copy["file"] = f"{run}/{step}"
    if "report" in row:
        copy["report"] = {**row["report"], "step": step}
    return copy
