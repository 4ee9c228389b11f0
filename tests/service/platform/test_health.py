"""Readiness: every check answers in time, and one that fails says which."""

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from foreshock_service.platform.health import CHECK_SECONDS
from foreshock_service.platform.settings import Settings
from tests.paths import PYTHONPATH
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


_ARRAYS = """
import sys
import pyarrow as pa
from foreshock_service.platform.process import spare_pandas

spare_pandas()
assert pa.array([1.0, None]).null_count == 1
assert "pandas" not in sys.modules, "an array imported pandas"
import pandas
assert pandas.IS_HERE
"""


def test_arrays_are_made_without_pandas_and_it_can_be_imported_afterwards(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("IS_HERE = True\n")
    subprocess.run(
        [sys.executable, "-c", _ARRAYS], env={"PYTHONPATH": f"{tmp_path}:{PYTHONPATH}"}, cwd=tmp_path, check=True
    )
