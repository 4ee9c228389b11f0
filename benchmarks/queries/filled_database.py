"""Runs that are written into a service's database by SQL: uploading so many steps would take hours."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import psycopg
from psycopg import sql

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.registry import MEASURES
from foreshock.measures.statistics.conditions import BUCKET_EDGES

DATABASE = "foreshock-data/foreshock.db"
_COLUMNS = tuple(measure.column for measure in MEASURES)


def start_runs(http: httpx.Client, count: int, prefix: str) -> list[str]:
    """Create runs with one attempt each; return their ids."""
    runs = []
    for number in range(count):
        run = http.post("/v1/runs", json={"key": f"{prefix}-{number}", "model": "Qwen/Qwen3-8B"}).raise_for_status()
        runs.append(run.json()["id"])
        http.post(f"/v1/runs/{runs[-1]}/attempts", json={"key": "first"}).raise_for_status()
    return runs


def fill_postgresql(url: str, run: str, steps: int) -> None:
    """Give a run of a PostgreSQL database so many closed steps with two measured comparisons."""
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        for table, rows in (("steps", _steps(run, steps)), ("measurements", _measurements(run, steps))):
            names = sql.SQL(", ").join(map(sql.Identifier, rows[0]))
            command = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table), names)
            with cursor.copy(command) as copy:
                for row in rows:
                    copy.write_row(list(row.values()))
        cursor.execute(
            "UPDATE runs SET last_step = %s, rollouts = %s, tokens = %s WHERE id = %s", (steps - 1, steps, steps, run)
        )


def fill_steps(folder: Path, runs: Sequence[str], steps: int) -> None:
    """Give each run so many closed steps with two measured comparisons, and an acknowledgement of each step."""
    buckets = np.ones((2, len(BUCKET_EDGES) - 1)).tobytes()
    with sqlite3.connect(folder / DATABASE, timeout=60) as database:
        for run in runs:
            _insert(database, "steps", _steps(run, steps))
            _insert(database, "measurements", _measurements(run, steps))
            _insert(database, "advice_acknowledgements", _acknowledgements(run, steps))
            newest = {"run_id": run, "attempt": 1, "step": steps - 1, "revision": steps, "rewritten": 1}
            for comparison in (STEP_ROW, TRAINER_ROLLOUT):
                _insert(database, "newest_measurements", [{**newest, "comparison": comparison, "buckets": buckets}])
            database.execute(
                "UPDATE runs SET last_step = ?, rollouts = ?, tokens = ?, last_shard_at_us = ? WHERE id = ?",
                (steps - 1, steps, steps, steps, run),
            )
            database.commit()


def _insert(database: sqlite3.Connection, table: str, rows: Sequence[dict[str, object]]) -> None:
    names = ", ".join(rows[0])
    marks = ", ".join("?" * len(rows[0]))
    database.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", [tuple(row.values()) for row in rows])


def _steps(run: str, steps: int) -> list[dict[str, object]]:
    counts = dict.fromkeys(("expected_shards", "received_shards", "folded_shards", "rollouts", "tokens"), 1)
    times = dict.fromkeys(("first_shard_at_us", "last_shard_at_us", "closed_at_us"), 1)
    return [{"run_id": run, "attempt": 1, "step": step, **counts, **times} for step in range(steps)]


def _measurements(run: str, steps: int) -> list[dict[str, object]]:
    return list(_measured(run, steps))


def _measured(run: str, steps: int) -> Iterator[dict[str, object]]:
    for step in range(steps):
        key = {"run_id": run, "attempt": 1, "step": step, "from_sample": False, "computed_at_us": step}
        values = {column: 1e-3 * math.sin(step * 0.01 + place) + 1e-2 for place, column in enumerate(_COLUMNS)}
        for comparison in (STEP_ROW, TRAINER_ROLLOUT):
            yield {**key, "comparison": comparison, **values}


def _acknowledgements(run: str, steps: int) -> list[dict[str, object]]:
    fixed = {"revision": 0, "applied_learning_rate": 1e-6, "applied_scale": 1.0, "received_at_us": 1}
    return [{"run_id": run, "attempt": 1, "step": step, **fixed} for step in range(steps)]
