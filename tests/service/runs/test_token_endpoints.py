"""Answers to a request for the tokens of one rollout, by format and by who asks."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace

import httpx
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys import KeyLimits, Scope
from foreshock_service.platform.settings import Settings
from tests.service.keys import make_key
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import list_files

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
BATCH = make_batch(70, seed=3)
NAME = BATCH.sample_ids[66]


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    sender = start_run(http)
    sender.put_shard(2, BATCH).raise_for_status()
    return sender


@on_sqlite
def test_rollouts_of_all_shards_are_one_file(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are joined on the disk of the store: the system's folder may be in memory.
    monkeypatch.setattr(tempfile, "tempdir", "/not-there")
    run = start_run(http)
    plain = replace(make_batch(5, seed=1), reward=None)
    for shard, batch in enumerate((plain, make_batch(7, seed=2))):
        run.put_shard(3, batch, shard, 2).raise_for_status()
    answer = run.get("steps/3/rollouts").raise_for_status()
    table = pq.read_table(io.BytesIO(answer.content))
    assert answer.headers["content-disposition"] == 'attachment; filename="step_3.parquet"'
    assert table["sample_id"].to_pylist() == [*plain.sample_ids, *make_batch(7, seed=2).sample_ids]
    assert table["reward"].null_count == 5
    assert run.get("steps/4/rollouts").status_code == 404
    assert len(list_files(settings)) == 2


@on_sqlite
def test_answer_to_a_request_for_tokens(http: httpx.Client, run: Sender, app: FastAPI) -> None:
    url = f"/v1/runs/{run.run}/steps/2/tokens"

    def ask(
        headers: dict[str, str] | None = None, at: str = url, **parameters: str | float
    ) -> tuple[int, httpx.Headers]:
        answer = http.get(at, params={"sample_id": NAME, **parameters}, headers=headers)
        return answer.status_code, answer.headers

    status, headers = ask()
    assert status == 200
    assert ask({"If-None-Match": headers["etag"]})[0] == 304
    assert ask(attempt=1, from_position=1, to_position=2, comparison="trainer/rollout")[0] == 200
    for name in ("json", "csv", "parquet"):
        assert ask(format=name)[0] == 200
    assert ask({"Accept": "text/csv"})[1]["content-type"].startswith("text/csv")
    assert ask({"Accept": "image/png"})[0] == 406
    assert ask({"Accept-Encoding": "gzip"})[1]["content-encoding"] == "gzip"
    assert ask(sample_id="nobody")[0] == 404
    assert ask(attempt=9)[0] == 404
    assert ask(comparison="no/such")[0] == 422
    assert ask(at=url.replace("steps/2", "steps/3"))[0] == 404
    assert ask(at=url.replace(run.run, "run_" + "0" * 26))[0] == 404
    database: Database = app.state.context.database
    assert ask(make_key(database, Scope.READ)[1])[0] == 200
    assert ask()[0] == 401
    assert ask(make_key(database, Scope.WORKER)[1])[0] == 403
    assert ask(make_key(database, Scope.READ, project="another")[1])[0] == 404


@on_sqlite
def test_a_request_counts_against_the_limit_of_its_key(http: httpx.Client, run: Sender, app: FastAPI) -> None:
    _, headers = make_key(app.state.context.database, Scope.READ)
    limits: KeyLimits = app.state.context.key_limits
    limits._rates["requests"], limits._most["requests"] = 1.0, 5.0
    url = f"/v1/runs/{run.run}/steps/2/tokens"
    statuses = [http.get(url, params={"sample_id": NAME}, headers=headers).status_code for _ in range(8)]
    assert (statuses[0], statuses[-1]) == (200, 429)
