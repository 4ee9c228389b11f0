"""Databases that earlier versions made open with this one: same numbers, and every page and answer of their runs.

`earlier/` holds a database of each of three commits. Each has the run that `RUN_KEY` names: 60 steps with scalars, of
which step 30 has two shards, alerts, a schedule that decays, and a second attempt from step 58 on.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from fastapi import FastAPI

from foreshock.commands.main import main
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.opening import EARLIER, current_revision, newest_revision, prepare_database
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Base, MeasurementStatistics, measurements
from foreshock_service.watch.detection.background import derive_due, note_outdated
from tests.service.sending import Sender, make_batch

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

EARLIER_DATABASES = Path(__file__).with_name("earlier")
RUN_KEY = "an-old-run"
REVISIONS = {"796cba0": "0003", "4293784": "0005", "edd6602": "0038"}
# What a conversion may not change: of every old column, row by row.
KEPT = (
    "runs", "attempts", "steps", "shards", "measurements", "scalars", "advice_decisions", "advice_acknowledgements",
    "alerts",
)  # fmt: skip


@pytest.fixture(
    params=["796cba0.db", "4293784.db", "edd6602.db", "4293784.sql", "edd6602.sql"],
    ids=lambda name: name.replace(".db", "-sqlite").replace(".sql", "-postgresql"),
)
def old_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database as an earlier version left it."""
    data = zstd.decompress((EARLIER_DATABASES / f"{request.param}.zst").read_bytes())
    if request.param.endswith(".db"):
        (tmp_path / "foreshock.db").write_bytes(data)
        url = f"sqlite:///{tmp_path / 'foreshock.db'}"
    else:
        url = request.getfixturevalue("postgres").new_database()
        # Without the commands of psql.
        statements = "\n".join(line for line in data.decode().split("\n") if not line.startswith("\\"))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statements.encode())
    with connected(url) as connection:
        assert current_revision(connection) == REVISIONS[request.param.partition(".")[0]]
    return url


@pytest.fixture
def before(old_database: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of KEPT before the conversion."""
    return {table: rows_of(old_database, table) for table in KEPT}


@pytest.fixture
def database_url(old_database: str, before: Mapping[str, Any]) -> str:
    """The URL of the converted database."""
    prepare_database(old_database)
    return old_database


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """The old run, of which the service has made what the conversion left to it."""
    return Sender(http, http.get("/v1/runs", params={"key": RUN_KEY}).json()["items"][0]["id"], attempt=2)


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """A connection to the database, whose changes are not committed."""
    engine = make_engine(url)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def derive_what_is_due(app: FastAPI) -> None:
    """Do what the service does in the background after its start."""
    database = app.state.context.database
    note_outdated(database)
    deadline = time.monotonic() + 60
    # The thread of the service may be at it, and on PostgreSQL one of the two derives at a time.
    while derive_due(app.state.context.events, database) or rows_of(database.url, "due_replays"):
        assert time.monotonic() < deadline


def rows_of(url: str, table: str) -> list[dict[str, Any]]:
    """Return every row of a table, in an order of their own."""
    with connected(url) as connection:
        found = connection.execute(sa.text(f"SELECT * FROM {table}")).mappings()
        return sorted(map(dict, found), key=lambda row: repr([row.get(name) for name in _KEYS]))


_KEYS = ("run_id", "attempt", "step", "shard", "comparison", "source", "name", "revision", "id")


def test_converted_database_has_exactly_the_declared_tables(database_url: str) -> None:
    with connected(database_url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert current_revision(connection) == newest_revision()
        assert newest_revision() not in EARLIER
        # The audit stays append-only.
        connection.execute(
            sa.text("INSERT INTO audit_entries (id, at_us, actor, action, subject) VALUES ('a', 1, 'b', 'c.d', 'e')")
        )
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            connection.execute(sa.text("DELETE FROM audit_entries WHERE id = 'a'"))


_GONE = {"k3_kl_interval_reliable"}
"""Measures of earlier releases that have no column any more."""


def test_stored_values_are_kept(database_url: str, before: dict[str, list[dict[str, Any]]]) -> None:
    for table in before.keys() - {"alerts"}:
        old = before[table]
        new = rows_of(database_url, table)
        assert len(old) > 0 or table == "advice_acknowledgements"
        for row, kept in zip(new, old, strict=True):
            assert {name: row[name] for name in kept if name in row} == {
                name: value for name, value in kept.items() if name not in _GONE
            }, table


def test_statistics_are_those_of_the_stored_measures(database_url: str) -> None:
    database = Database(database_url)
    with database.read() as session:
        stored = session.scalars(sa.select(MeasurementStatistics)).all()
        rows = {(row.attempt, row.step, row.comparison): row for row in session.execute(sa.select(measurements)).all()}
    database.close()
    assert len(stored) == len(rows)
    compared = 0
    for each in stored:
        assert each.statistics.startswith(b"FSST")
        if each.statistics_version == STATISTICS_VERSION and each.comparison == "trainer/rollout":
            found = ComparisonStatistics.from_bytes(each.statistics).measures()
            row = rows[each.attempt, each.step, each.comparison]
            for name in ("k3_kl", "chi2_token", "log_ppl_abs_diff", "tail_mass_2", "d_p99"):
                if name in found and getattr(row, name, None) is not None:
                    assert found[name] == pytest.approx(getattr(row, name), rel=1e-12)
                    compared += 1
    assert compared > 0 or not any(each.statistics_version == STATISTICS_VERSION for each in stored)


def test_pages_and_answers_of_the_run_are_there(run: Sender, app: FastAPI, capsys: pytest.CaptureFixture[str]) -> None:
    derive_what_is_due(app)
    advice = run.get("lr-advice", step=61).raise_for_status().json()
    assert (advice["attempt"], advice["mode"], advice["schedule"]["factor"]) == (2, "apply", 0.5)
    assert advice["scale"] <= 0.5
    for path in ("measurements", "alerts", "lint", "steps", "scalars"):
        assert run.get(path).status_code == 200, (path, run.get(path).text)
    severities = {alert["severity"] for alert in run.get("alerts").json()["items"]}
    assert severities
    assert severities <= {"info", "warning", "critical"}
    for page in ("/", f"/runs/{run.run}", f"/runs/{run.run}/steps/45"):
        assert run.http.get(page).status_code == 200, page
    assert main(["report", run.run, "--full", "--url", str(run.http.base_url)]) == 0
    assert "tail_heavy" in capsys.readouterr().out


def test_states_that_are_derived_again_give_the_same_alerts_and_decisions(
    request: pytest.FixtureRequest,
    database_url: str,
    before: dict[str, list[dict[str, Any]]],
    run: Sender,
    app: FastAPI,
) -> None:
    derive_what_is_due(app)
    assert run.get("alerts").status_code == 200
    assert rows_of(database_url, "due_replays") == []
    assert len(rows_of(database_url, "detector_snapshots")) > 0
    decisions = [row["decision"] for row in before["advice_decisions"]]
    assert [row["decision"] for row in rows_of(database_url, "advice_decisions")][: len(decisions)] == decisions
    # Its rules of tails and errors are those of this version. Those of k3 and χ² judge the tokens at lag 0 since, and
    # what they said before stays in the list.
    if "edd6602" in request.node.name:
        found, earlier = rows_of(database_url, "alerts"), before["alerts"]
        assert _of_rules(found, "tail_", "multiplicative_") == _of_rules(earlier, "tail_", "multiplicative_") != set()
        assert _of_rules(found, "mismatch_", "chi2_", "reverse_") >= _of_rules(
            earlier, "mismatch_", "chi2_", "reverse_"
        )


def _of_rules(alerts: list[dict[str, Any]], *prefixes: str) -> set[tuple[str, int, float]]:
    return {(row["rule"], row["step"], row["value"]) for row in alerts if row["rule"].startswith(prefixes)}


def test_the_run_goes_on(run: Sender, app: FastAPI) -> None:
    assert run.put_shard(61, make_batch(seed=61)).json()["step_closed"]
    assert run.put_scalars(61, {"reward": 0.2}).status_code == 204
    late = run.put_shard(58, make_batch(seed=5), shard=0)
    assert late.status_code == 409
    derive_what_is_due(app)
    assert run.get("lr-advice", step=62).json()["observed_step"] == 61


def test_sqlite_file_stays_intact(old_database: str) -> None:
    if not old_database.startswith("sqlite"):
        pytest.skip("of SQLite")
    prepare_database(old_database)
    connection = sqlite3.connect(old_database.removeprefix("sqlite:///"))
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
