"""Convert a database of the schemas 0003 to 0039, which unreleased versions made, to the newest schema, in place.

Alembic compares the database with the declared tables, and its operations apply the differences in tables, columns and
indexes. This file has what a comparison cannot know. If a table changes:

- a new column that is not NULL and has no `server_default`: its value in old rows goes into `_NEW_VALUES`;
- a value that follows from others, or moves to another table or column: a statement in `_BEFORE` (runs before the
  operations, while the old columns are there), or in `_AFTER` (runs after them, before old tables are dropped);
- a table whose rows move to another table: a row in `_MOVED`;
- a column whose stored form changes: a conversion of its rows in pages, as in `_convert_blobs`.

States of the detectors that do not fit this release are derived again when the service starts. Revision 0038 kept the
newest ones in memory only; these are marked as due here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.operations.ops import AddColumnOp, DropTableOp, MigrateOperation, ModifyTableOps
from alembic.util import load_python_file

from foreshock_service.platform.database.tables import Base
from foreshock_service.platform.database.tables.base import JsonColumn, make_append_only

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_ROWS_AT_A_TIME = 500
_STEP = ("run_id", "attempt", "step")
_BLOBS = (
    ("shard_statistics", (*_STEP, "shard", "comparison"), "statistics"),
    ("shard_statistics", (*_STEP, "shard", "comparison"), "summaries"),
    ("measurement_statistics", (*_STEP, "comparison"), "statistics"),
    ("measurement_statistics", (*_STEP, "comparison"), "summaries"),
    ("shard_lint", (*_STEP, "shard"), "evidence"),
    ("step_lint", _STEP, "report"),
    ("detector_snapshots", _STEP, "state"),
)

_NEW_VALUES: dict[tuple[str, str], str] = {
    ("api_keys", "sessions_from_us"): "0",
    ("probe_jobs", "environments"): "''",
    ("probe_jobs", "environment_required"): "false",
    ("probe_jobs", "exact_pairs"): "'[]'",
    ("probe_jobs", "priority"): "'normal'",
    ("probe_jobs", "rank_us"): "0",
    ("probes", "exact_pairs"): "'[]'",
    ("steps", "folded_shards"): "0",
    ("workers", "environments"): "'[]'",
    ("workers", "exact_pairs"): "'[]'",
    ("due_replays", "changed_step"): "0",
}
# Each statement with the first revision that no longer needs it.
_BEFORE = (("0039", "DELETE FROM detector_snapshots WHERE state IS NULL"),)
_AFTER = (
    ("0040", "UPDATE attempts SET began_at_us = created_at_us"),
    ("0039", "UPDATE due_replays SET changed_step = from_step"),
    ("0006", "UPDATE alerts SET severity = 'warning' WHERE severity = 'look'"),
    ("0006", "UPDATE alerts SET severity = 'critical' WHERE severity = 'bad'"),
    ("0006", "UPDATE alerts SET rule = replace(rule, '_look', '_warning') WHERE rule LIKE '%\\_look' ESCAPE '\\'"),
    ("0006", "UPDATE alerts SET rule = replace(rule, '_bad', '_critical') WHERE rule LIKE '%\\_bad' ESCAPE '\\'"),
    ("0007", "UPDATE steps SET folded_shards = received_shards WHERE closed_at_us IS NOT NULL"),
    # Attributions are computed again, with the environments of their scores.
    ("0010", "UPDATE attributions SET stale = true"),
    (
        "0022",
        (
            "UPDATE runs SET rollouts = COALESCE((SELECT SUM(rollouts) FROM steps WHERE steps.run_id = runs.id), 0), "
            "tokens = COALESCE((SELECT SUM(tokens) FROM steps WHERE steps.run_id = runs.id), 0), "
            "last_shard_at_us = (SELECT MAX(last_shard_at_us) FROM steps WHERE steps.run_id = runs.id)"
        ),
    ),
    (
        "0022",
        (
            "INSERT INTO newest_measurements (run_id, comparison, attempt, step, revision, rewritten, buckets) "
            "SELECT run_id, comparison, attempt, MAX(step), 1, 1, NULL FROM measurements AS m WHERE attempt = "
            "(SELECT MAX(attempt) FROM measurements AS o WHERE o.run_id = m.run_id AND o.comparison = m.comparison) "
            "GROUP BY run_id, comparison, attempt"
        ),
    ),
    # The head start of the priority `normal`: a day.
    ("0032", "UPDATE probe_jobs SET rank_us = queued_at_us - 86400000000"),
    (
        "0037",
        (
            "INSERT INTO due_findings (run_id, source, changes) "
            "SELECT DISTINCT run_id, 'lint', 1 FROM step_lint WHERE severity IS NOT NULL"
        ),
    ),
    (
        "0037",
        (
            "INSERT INTO due_findings (run_id, source, changes) "
            "SELECT DISTINCT run_id, 'attribution', 1 FROM attributions WHERE computed_at_us IS NOT NULL"
        ),
    ),
)
# Dropped tables whose rows move to `probe_results`: the values of its columns `kind` and `pair`.
_MOVED = {
    "weights_searches": "'weights', ''",
    "layer_comparisons": "'layers', pair",
    "routing_comparisons": "'routing', pair",
}
_STATES_IN_MEMORY = sa.text("SELECT run_id, MIN(step) FROM detector_snapshots WHERE state IS NULL GROUP BY run_id")
_NOTE_DUE = sa.text(
    "INSERT INTO due_replays (run_id, from_step, changed_step) VALUES (:run_id, :step, :step) ON CONFLICT DO NOTHING"
)
_RENAMED_SEVERITIES = {"look": "warning", "bad": "critical"}


def convert(connection: sa.Connection, revision: str) -> None:
    """Convert a database of this revision to the declared tables; the caller stores its new revision."""
    _convert_lint_reports(connection, revision)
    in_memory = connection.execute(_STATES_IN_MEMORY).all()
    for needless_from, statement in _BEFORE:
        if revision < needless_from:
            connection.execute(sa.text(statement))
    drops = _make_declared_tables(connection)
    for needless_from, statement in _AFTER:
        if revision < needless_from:
            connection.execute(sa.text(statement))
    columns = "job_id, token, run_id, attempt, step, document, published_at_us"
    for table in _MOVED.keys() & set(sa.inspect(connection).get_table_names()):
        connection.execute(
            sa.text(f"INSERT INTO probe_results ({columns}, kind, pair) SELECT {columns}, {_MOVED[table]} FROM {table}")
        )
    load_python_file(str(Path(__file__).parent), "weights_searches.py").convert(connection)
    for table in drops:
        connection.execute(sa.text(f"DROP TABLE {table}"))
    if revision < "0017":
        make_append_only(connection)
    _convert_blobs(connection)
    for run_id, step in in_memory:
        connection.execute(_NOTE_DUE, {"run_id": run_id, "step": step})
    if connection.dialect.name == "sqlite" and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").all()):
        raise RuntimeError(f"rows of the converted database point to rows that do not exist: {broken[:3]}")


def _make_declared_tables(connection: sa.Connection) -> list[str]:
    """Apply the differences to the declared tables, except dropped tables; return these tables."""
    drops = []
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    operations = Operations(context)
    for table_name, operation in _flat(produce_migrations(context, Base.metadata).upgrade_ops):
        if isinstance(operation, DropTableOp):
            drops.append(operation.table_name)
            continue
        if isinstance(operation, AddColumnOp):
            column, default = operation.column, operation.column.server_default
            if not column.nullable and default is None:
                default = sa.DefaultClause(sa.text(_NEW_VALUES[operation.table_name, column.name]))
            # Not the declared column itself, which belongs to its table.
            operation.column = sa.Column(column.name, column.type, nullable=column.nullable, server_default=default)
        if table_name is None:
            operations.invoke(operation)
        else:
            with operations.batch_alter_table(table_name) as batch:
                batch.invoke(operation)
    return drops


def _flat(operations: Any, table_name: str | None = None) -> Iterator[tuple[str | None, MigrateOperation]]:
    for operation in operations.ops:
        if isinstance(operation, ModifyTableOps):
            yield from _flat(operation, operation.table_name)
        else:
            yield table_name, operation


def _convert_lint_reports(connection: sa.Connection, revision: str) -> None:
    """Convert the JSON column `report` of old lint verdicts to bytes, which `_convert_blobs` compresses."""
    if not "0005" <= revision < "0023":
        return
    connection.execute(sa.text("ALTER TABLE step_lint RENAME COLUMN report TO old_report"))
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    connection.execute(sa.text(f"ALTER TABLE step_lint ADD COLUMN report {kind}"))
    table = sa.table(
        "step_lint",
        *(sa.column(name) for name in (*_STEP, "severity", "report")),
        sa.column("warnings", JsonColumn),
        sa.column("old_report", JsonColumn),
    )
    for rows in _pages(connection, table, _STEP, ("severity", "warnings", "old_report")):
        for row in rows:
            report = row.old_report
            for warning in report["warnings"]:
                warning["severity"] = _renamed(warning["severity"])
            values = {
                "severity": _renamed(row.severity),
                "warnings": {name: _renamed(severity) for name, severity in row.warnings.items()},
                "report": json.dumps(report, ensure_ascii=False, separators=(",", ":")).encode(),
            }
            connection.execute(sa.update(table).where(*_is_row(table, _STEP, row)).values(values))


def _renamed(severity: str | None) -> str | None:
    return severity if severity is None else _RENAMED_SEVERITIES.get(severity, severity)


def _convert_blobs(connection: sa.Connection) -> None:
    """Unpack packed values, and compress all values as the declared tables do."""
    unpack: Callable[[bytes], bytes] = load_python_file(str(Path(__file__).parent), "unpacking.py").unpack
    for name, key, column in _BLOBS:
        table = sa.table(name, *map(sa.column, key), sa.column(column, sa.LargeBinary()))
        of_key = [table.c[each] == sa.bindparam(f"key_{each}") for each in key]
        update = sa.update(table).where(*of_key).values({column: sa.bindparam("compressed")})
        for rows in _pages(connection, table, key, (column,)):
            changed = [
                {
                    **{f"key_{each}": getattr(row, each) for each in key},
                    "compressed": zstd.compress(unpack(bytes(getattr(row, column)))),
                }
                for row in rows
                if getattr(row, column) is not None
            ]
            if changed:
                connection.execute(update, changed)


def _pages(
    connection: sa.Connection, table: sa.TableClause, key: Sequence[str], columns: Sequence[str]
) -> Iterator[Sequence[Any]]:
    """Yield the rows of a table in pages, in the order of its key."""
    of_key = [table.c[name] for name in key]
    query = sa.select(*of_key, *(table.c[name] for name in columns)).order_by(*of_key).limit(_ROWS_AT_A_TIME)
    rows = connection.execute(query).all()
    while rows:
        yield rows
        after = sa.tuple_(*of_key) > sa.tuple_(*(sa.literal(getattr(rows[-1], name)) for name in key))
        rows = connection.execute(query.where(after)).all()


def _is_row(table: sa.TableClause, key: Sequence[str], row: Any) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == getattr(row, name) for name in key]
