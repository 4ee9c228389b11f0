"""Answers to uploads, by what is stored and who asks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event, select

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.keys import KeyLimits, Scope, create_key, new_secret
from foreshock_service.platform.request_guards import PARQUET_MEDIA_TYPE
from tests.service.sending import make_batch, start_run

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def make_key(database: Database, *scopes: Scope, project: str | None = None) -> dict[str, str]:
    secret = new_secret()
    database.write(lambda session: create_key(session, secret, "test", project, scopes))
    return {"Authorization": f"Bearer {secret}"}


@on_sqlite
def test_answer_to_an_upload(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http).run
    body, other = (encode_rollouts(make_batch(2, seed=seed)) for seed in (1, 2))

    def status(path: str, body: bytes, headers: dict[str, str] | None = None, **parameters: int) -> int:
        sent = {"Content-Type": PARQUET_MEDIA_TYPE} | (headers or {})
        return http.put(path, params=parameters, content=body, headers=sent).status_code

    path = f"/v1/runs/{run}/steps/0/rollouts/0"
    assert status(path, body) == 201
    assert status(path, body) == 200
    assert status(path, other) == 409
    assert status(path, body, shards=2) == 409
    assert status(path, body, attempt=9) == 404
    assert status(path.replace(run, "run_" + "0" * 26), body) == 404
    missing = f"/v1/runs/{run}/steps/2/rollouts/1"
    assert status(missing, body) == 422
    assert status(missing, b"PAR1 is not enough", shards=2) == 422
    assert status(f"/v1/runs/{run}/steps/2/statistics/0", body) == 415
    database = app.state.context.database
    ingester, reader = make_key(database, Scope.INGEST), make_key(database, Scope.READ)
    stranger = make_key(database, Scope.INGEST, project="another")
    assert status(path, body) == 401
    assert status(path, body, {"Authorization": "Bearer fsk_unknown"}) == 401
    assert status(path, body, reader) == 403
    assert status(path, body, stranger) == 404
    assert status(path, body, ingester) == 200


@on_sqlite
def test_upload_counts_against_the_limit_of_its_key(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http).run
    headers = make_key(app.state.context.database, Scope.INGEST) | {"Content-Type": PARQUET_MEDIA_TYPE}
    limits: KeyLimits = app.state.context.key_limits
    limits._rates["requests"], limits._most["requests"] = 1.0, 5.0
    body = encode_rollouts(make_batch(1, seed=1))
    url = f"/v1/runs/{run}/steps/0/rollouts/0"
    statuses = [http.put(url, content=body, headers=headers).status_code for _ in range(8)]
    assert (statuses[0], statuses[-1]) == (201, 429)


@on_sqlite
def test_steps_that_are_ready_while_the_writer_is_busy_are_committed_together(http: httpx.Client, app: FastAPI) -> None:
    database = app.state.context.database
    sender = start_run(http)
    sender.put_shard(1, encode_rollouts(make_batch(seed=1))).raise_for_status()
    commits: list[object] = []
    event.listen(database._write_engine, "commit", commits.append)
    entered, leave = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        leave.wait(60)

    with ThreadPoolExecutor(4) as threads:
        held = threads.submit(database.write, hold)
        assert entered.wait(60)
        sent = [threads.submit(sender.put_shard, step, encode_rollouts(make_batch(seed=step))) for step in (2, 3, 4)]
        deadline = time.monotonic() + 60
        while database.writes_waiting < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert database.writes_waiting == 3
        leave.set()
        held.result()
        answers = [each.result() for each in sent]
    assert all(answer.json()["step_closed"] for answer in answers)
    # The unit that held the writer changes nothing, so it has no transaction.
    assert len(commits) == 1
    with database.read() as session:
        assert session.scalars(select(Shard.step).order_by(Shard.step)).all() == [1, 2, 3, 4]
