"""A database of another release: statistics of version 1, recorded with that release in `version_1.json`.

They are of two shards of one step, `recorded_shards()`. Upload those to the current service, then call `make_old`.
"""

import base64
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.database import tables
from foreshock_service.platform.database.session import Database
from foreshock_service.runs.events import StepKey
from tests.service.sending import Sender, make_batch

_RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "version_1.json").read_text())
VERSION = 1


def recorded_shards() -> list[RolloutBatch]:
    return [make_batch(_RECORDED["rollouts_a_shard"], seed=seed) for seed in _RECORDED["seeds"]]


def put_steps(sender: Sender, *steps: int, shards: Sequence[int] = (0, 1)) -> None:
    """Upload these of the two shards of each step."""
    for step in steps:
        for shard in shards:
            sender.put_shard(step, recorded_shards()[shard], shard, 2).raise_for_status()


def make_old(database: Database, sender: Sender, *steps: int, shards: Sequence[int] = (0, 1)) -> None:
    """Replace the statistics of steps by the recorded ones: of these shards, and of the folds if there are some.

    A measure that the other release did not have is NULL, here `rms_d`; nor had it a lint.
    """
    for step in steps:
        key = StepKey(sender.run, sender.attempt, step)
        database.write(partial(_make_old, key=key, numbers=shards))


def _make_old(session: Session, key: StepKey, numbers: Sequence[int]) -> None:
    chosen = key._asdict()
    session.execute(delete(tables.ShardStatistics).filter_by(**chosen).where(tables.ShardStatistics.shard.in_(numbers)))
    session.execute(delete(tables.ShardLint).filter_by(**chosen).where(tables.ShardLint.shard.in_(numbers)))
    session.execute(delete(tables.StepLint).filter_by(**chosen))
    for each in _RECORDED["shards"]:
        if each["shard"] in numbers:
            session.add(tables.ShardStatistics(**chosen, shard=each["shard"], **_columns(each)))
    for each in _RECORDED["folded"]:
        stored = session.get(tables.MeasurementStatistics, (*key, each["comparison"]))
        if stored is not None:
            for name, value in _columns(each).items():
                setattr(stored, name, value)
    table = tables.measurements.c
    of_step = (table.run_id == key.run_id) & (table.attempt == key.attempt) & (table.step == key.step)
    session.execute(update(tables.measurements).where(of_step).values(rms_d=None))
    # Whatever stores measurements notes it here; a service that has read the curves reads them again.
    again = tables.NewestMeasurement.revision + 1
    of_run = tables.NewestMeasurement.run_id == key.run_id
    session.execute(
        update(tables.NewestMeasurement).where(of_run).values(revision=again, rewritten=again, buckets=None)
    )


def _columns(recorded: dict[str, Any]) -> dict[str, Any]:
    return {
        "comparison": recorded["comparison"],
        "statistics_version": VERSION,
        "statistics": base64.b64decode(recorded["statistics"]),
        "summaries": None if recorded["summaries"] is None else base64.b64decode(recorded["summaries"]),
    }


def stored_bytes(database: Database) -> dict[tuple[Any, ...], tuple[int, bytes, bytes | None]]:
    """Return all stored statistics: key → version, statistics, summaries."""
    found = {}
    with database.read() as session:
        for part in session.scalars(select(tables.ShardStatistics)):
            key: tuple[Any, ...] = (part.run_id, part.attempt, part.step, part.comparison, part.shard)
            found[key] = (part.statistics_version, part.statistics, part.summaries)
        for whole in session.scalars(select(tables.MeasurementStatistics)):
            key = (whole.run_id, whole.attempt, whole.step, whole.comparison)
            found[key] = (whole.statistics_version, whole.statistics, whole.summaries)
    return found
