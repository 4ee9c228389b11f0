"""A database with a run in every table goes back to the last release and forth again, and keeps its data."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.packing import is_newer_than_sparse, unpack
from foreshock_service.platform.database.schema import newest_revision, upgrade
from foreshock_service.platform.database.tables import Base
from foreshock_service.platform.settings import Settings
from tests.service.sending import make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_probe, work_off

LAST_RELEASE = "0016"
BEFORE_DERIVED_STATISTICS = "0027"


def rows_of(url: str, columns: dict[str, set[str]] | None = None) -> dict[str, list[str]]:
    """Return the rows of every table, or the given columns of those tables, in an order of their own."""
    engine = make_engine(url)
    found: dict[str, list[str]] = {}
    with engine.begin() as connection:
        for table in sa.inspect(connection).get_table_names():
            if columns is not None and table not in columns:
                continue
            rows = connection.execute(sa.text(f'SELECT * FROM "{table}"')).mappings()
            kept = [{name: _shown(value) for name, value in row.items()} for row in rows]
            if columns is not None:
                kept = [{name: row[name] for name in sorted(columns[table])} for row in kept]
            found[table] = sorted(map(repr, kept))
    engine.dispose()
    return found


def columns_of(url: str) -> dict[str, set[str]]:
    """Return the columns of every table but Alembic's own."""
    engine = make_engine(url)
    with engine.begin() as connection:
        inspector = sa.inspect(connection)
        found = {
            table: {column["name"] for column in inspector.get_columns(table)} for table in inspector.get_table_names()
        }
    engine.dispose()
    del found["alembic_version"]
    return found


def newer_packings(url: str) -> set[str]:
    """Return the tables with blobs that releases before 0028 cannot read."""
    engine = make_engine(url)
    found: set[str] = set()
    with engine.begin() as connection:
        for table in ("measurement_statistics", "shard_statistics", "shard_lint"):
            for row in connection.execute(sa.text(f'SELECT * FROM "{table}"')):
                blobs = (bytes(value) for value in row if isinstance(value, bytes | memoryview))
                found.update({table} if any(map(is_newer_than_sparse, blobs)) else ())
    engine.dispose()
    return found


def _shown(value: Any) -> str:
    """Return a value as it is read: documents may be JSON or packed, and blobs packed or not."""
    if isinstance(value, bytes | memoryview):
        value = unpack(bytes(value))
    text = bytes(value) if isinstance(value, bytes) else value
    if isinstance(text, str | bytes) and text[:1] in ("{", b"{"):
        value = json.loads(text)
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return value.hex() if isinstance(value, bytes) else repr(value)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """The URL of a migrated database of this test's own: migrating back must not touch that of other tests."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/own.db"
    else:
        url = request.getfixturevalue("postgres").new_database()
    upgrade(url)
    return url


def test_data_survives_the_way_to_the_last_release_and_back(http: httpx.Client, settings: Settings) -> None:
    sender = start_run(http)
    for step in (1, 2, 3):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
        sender.put_scalars(step, {"reward": 0.5, "entropy": 1.0}).raise_for_status()
    sender.put_statistics(4, make_batch(seed=4)).raise_for_status()
    for shard in (0, 1):
        sender.put_shard(6, make_batch(seed=6 + shard), shard=shard, shards=2).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"]).raise_for_status()
    work_off(http)
    url = settings.database_url
    at_head = rows_of(url)
    filled = {table for table, rows in at_head.items() if rows}
    assert {"runs", "steps", "shards", "shard_statistics", "measurements", "scores", "attributions"} <= filled

    assert newer_packings(url) >= {"measurement_statistics", "shard_statistics", "shard_lint"}
    upgrade(url, BEFORE_DERIVED_STATISTICS)
    assert newer_packings(url) == set()
    upgrade(url, LAST_RELEASE)
    columns = columns_of(url)
    assert "deletions" not in columns
    old = rows_of(url, columns)
    expected = {table: len(at_head[table]) for table in columns}
    # Two rows of each of the four shards that are their whole steps.
    expected["shard_statistics"] += 8
    assert {table: len(rows) for table, rows in old.items()} == expected
    upgrade(url)
    assert rows_of(url, columns) == old
    engine = make_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == newest_revision()
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()
    # The running service reads it as before.
    assert sender.get("steps/1/attribution").status_code == 200
    assert sender.put_shard(5, make_batch(seed=5)).status_code == 201
