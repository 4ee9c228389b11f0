"""A database with statistics of another release: the service runs, reports missing data and closes its steps."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from foreshock.commands.main import main
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Shard
from foreshock_service.runs.events import StepKey
from tests.service.advancing import close_overdue
from tests.service.maintenance.remeasure.old_release import VERSION, make_old, put_steps, stored_bytes
from tests.service.sending import Sender, start_run
from tests.service.server import RunningServer


def columns(sender: Sender) -> Any:
    return sender.read("measurements")["columns"]


def lose_tokens(app: FastAPI, database: Database, run: str, shard: int) -> None:
    with database.read() as session:
        name = session.scalars(select(Shard.file).where(Shard.run_id == run, Shard.shard == shard)).one()
    Path(app.state.context.store.path_of(name)).unlink()


def test_step_that_was_open_during_the_upgrade_closes_with_all_rollouts(http: httpx.Client, database: Database) -> None:
    sender, twin = start_run(http), start_run(http, "twin")
    put_steps(sender, 3, shards=[0])
    make_old(database, sender, 3, shards=[0])
    put_steps(sender, 3, shards=[1])
    put_steps(twin, 3)
    assert columns(sender) == columns(twin)
    assert sender.get("steps/3/lint").json() == twin.get("steps/3/lint").json()
    assert {version for version, _, _ in stored_bytes(database).values()} == {STATISTICS_VERSION}


def test_step_without_its_old_tokens_reports_it(
    http: httpx.Client, app: FastAPI, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    sender, twin = start_run(http), start_run(http, "twin")
    put_steps(sender, 3, shards=[0])
    make_old(database, sender, 3, shards=[0])
    lose_tokens(app, database, sender.run, 0)
    put_steps(sender, 3, shards=[1])
    put_steps(twin, 3, shards=[1])
    assert sender.get("steps").json()["items"][0]["closed"] is True
    assert close_overdue(app.state.context) == 1
    found, whole = columns(sender), columns(twin)
    assert found.pop("from_sample") == [True, True]
    assert whole.pop("from_sample") == [False, False]
    assert found == whole
    assert "foreshock remeasure" in caplog.text


def test_step_that_cannot_be_measured_is_closed(sender: Sender, app: FastAPI, database: Database) -> None:
    put_steps(sender, 3, shards=[0])
    make_old(database, sender, 3, shards=[0])
    lose_tokens(app, database, sender.run, 0)
    assert close_overdue(app.state.context) == 1
    assert sender.get("steps").json()["items"][0]["closed"] is True
    assert columns(sender)["step"] == []
    assert sender.get("steps/3/buckets").status_code == 404


def test_fold_of_all_shards_is_not_replaced_by_a_part(sender: Sender, app: FastAPI, database: Database) -> None:
    put_steps(sender, 3, shards=[0])
    assert close_overdue(app.state.context) == 1
    before = columns(sender)
    make_old(database, sender, 3, shards=[0])
    lose_tokens(app, database, sender.run, 0)
    put_steps(sender, 3, shards=[1])
    assert columns(sender)["num_rollouts"] == before["num_rollouts"]


def test_views_of_old_statistics_name_the_command(
    sender: Sender, http: httpx.Client, app: FastAPI, database: Database
) -> None:
    put_steps(sender, 3)
    k3 = columns(sender)["k3_kl"]
    make_old(database, sender, 3)
    refused = sender.get("steps/3/buckets")
    assert (refused.status_code, refused.headers["content-type"]) == (409, "application/problem+json")
    problem = refused.json()
    assert problem["type"] == "urn:foreshock:problem:statistics-out-of-date"
    assert f"version {VERSION}" in problem["detail"]
    assert "`foreshock remeasure`" in problem["detail"]
    assert columns(sender)["k3_kl"] == k3

    figure = http.get(f"/pages/runs/{sender.run}/steps/3/figures/buckets.json").json()
    assert "`foreshock remeasure`" in figure["missing"]
    for page in (f"/runs/{sender.run}/steps/3", f"/runs/{sender.run}"):
        assert "foreshock remeasure" in http.get(page).raise_for_status().text
    metrics = http.get("/metrics").raise_for_status().text
    assert "foreshock_k3_kl_nats{" in metrics
    assert "foreshock_bucket_tokens{" not in metrics

    assert remeasure_step(app.state.context, StepKey(sender.run, 1, 3)) is None
    assert sender.get("steps/3/buckets").status_code == 200
    assert "foreshock remeasure" not in http.get(f"/runs/{sender.run}/steps/3").text
    assert "foreshock_bucket_tokens{" in http.get("/metrics").text


def test_report_names_old_statistics_and_shows_the_rest(
    sender: Sender, server: RunningServer, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    put_steps(sender, 3)
    make_old(database, sender, 3)
    assert main(["report", "a-run", "--full", "--url", server.url]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "need `foreshock remeasure`" in text
    assert "Mismatch per token (k3)" in text
