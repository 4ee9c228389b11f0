"""Readiness: every check answers in time, and one that fails says which."""

import sqlite3
import time

import httpx
import pytest

from foreshock_service.platform.health import CHECK_SECONDS
from foreshock_service.platform.settings import Settings
from tests.service.postgres import PostgresCluster


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_frozen_database_makes_the_service_unready_and_not_dead(http: httpx.Client, postgres: PostgresCluster) -> None:
    with postgres.frozen():
        begin = time.monotonic()
        answer = http.get("/readyz")
        # The checks run side by side.
        assert time.monotonic() - begin < 10 * CHECK_SECONDS
        assert http.get("/livez").status_code == 200
    assert answer.status_code == 503
    assert answer.json()["checks"]["database"] == f"failed: no answer within {CHECK_SECONDS:g} s"
    assert answer.json()["checks"]["token_store"] == "ok"
    assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_database_that_cannot_be_written_makes_the_service_unready(http: httpx.Client, settings: Settings) -> None:
    other = sqlite3.connect(settings.database_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"]["database"].startswith("failed: ")
    assert answer.json()["checks"]["migrations"] == "ok"
    other.execute("ROLLBACK")
    other.close()
    assert http.get("/readyz").status_code == 200
