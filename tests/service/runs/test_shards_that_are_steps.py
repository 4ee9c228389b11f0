"""The statistics of a shard that is its whole step are held once, by the step."""

from __future__ import annotations

import httpx
from fastapi import FastAPI
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import MeasurementStatistics, ShardStatistics
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.shards import StoredPart, shard_versions, statistics_of_step
from tests.service.sending import make_batch, start_run


def parts_of(database: Database, key: StepKey) -> list[StoredPart]:
    """Return the statistics of the step's shards."""
    with database.read() as session:
        return list(statistics_of_step(session, key))


def rows(database: Database) -> int:
    """Return the number of rows that shards have of their own."""
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(ShardStatistics)) or 0


def test_statistics_of_the_only_shard_are_those_of_the_step(http: httpx.Client, app: FastAPI) -> None:
    sender = start_run(http)
    sender.put_shard(0, make_batch()).raise_for_status()
    database, key = app.state.context.database, StepKey(sender.run, sender.attempt, 0)
    assert rows(database) == 0
    parts = parts_of(database, key)
    assert [(part.shard, part.comparison) for part in parts] == [(0, STEP_ROW), (0, TRAINER_ROLLOUT)]
    with database.read() as session:
        for part in parts:
            whole = session.get_one(MeasurementStatistics, (*key, part.comparison))
            assert (part.statistics, part.summaries) == (whole.statistics, whole.summaries)
        assert shard_versions(session, key) == {(0, STATISTICS_VERSION)}


def test_comparisons_of_probes_are_not_of_the_shard(http: httpx.Client, app: FastAPI) -> None:
    sender = start_run(http)
    sender.put_shard(0, make_batch()).raise_for_status()
    database, key = app.state.context.database, StepKey(sender.run, sender.attempt, 0)
    parts = parts_of(database, key)

    def add_probe(session: Session) -> None:
        whole = {"statistics_version": 1, "statistics": b"of a probe", "summaries": None}
        session.add(MeasurementStatistics(**key._asdict(), comparison="torch.float32/vllm.prefill", **whole))

    database.write(add_probe)
    assert parts_of(database, key) == parts


def test_steps_of_several_shards_keep_the_rows_of_each(http: httpx.Client, app: FastAPI) -> None:
    sender = start_run(http)
    database, key = app.state.context.database, StepKey(sender.run, sender.attempt, 0)
    sender.put_shard(0, make_batch(seed=1), 1, 2).raise_for_status()
    assert [part.shard for part in parts_of(database, key)] == [1, 1]
    sender.put_shard(0, make_batch(seed=2), 0, 2).raise_for_status()
    assert [part.shard for part in parts_of(database, key)] == [0, 1, 0, 1]
    # Nothing is taken from the fold, should the rows of its shards be gone.
    database.write(lambda session: session.execute(delete(ShardStatistics)))
    assert parts_of(database, key) == []


def test_step_of_another_release_is_measured_again(http: httpx.Client, app: FastAPI) -> None:
    sender = start_run(http)
    sender.put_shard(0, make_batch()).raise_for_status()
    context, key = app.state.context, StepKey(sender.run, sender.attempt, 0)
    before = sender.get("measurements").json()["columns"]
    parts = parts_of(context.database, key)
    context.database.write(lambda session: session.execute(update(MeasurementStatistics).values(statistics_version=1)))
    with context.database.read() as session:
        assert shard_versions(session, key) == {(0, 1)}
    assert remeasure_step(context, key).left is None
    assert parts_of(context.database, key) == parts
    assert sender.get("measurements").json()["columns"] == before
