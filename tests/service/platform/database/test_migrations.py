"""The migrations make exactly the tables that the code declares, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from service.platform.database.engine import make_engine
from service.platform.database.schema import MIGRATIONS, current_revision, newest_revision, upgrade
from service.platform.database.session import Database
from service.platform.database.tables import Base, measurements

_MIGRATIONS = str(MIGRATIONS)
# The release before the measures of statistics version 2.
_BEFORE = "0003"


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database that nothing has migrated yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'old.db'}"
    url: str = request.getfixturevalue("postgres").new_database()
    return url


OLD_ROWS: dict[str, dict[str, object]] = {
    "runs": {
        "id": "run_1", "project": "default", "key": "a run", "state": "running", "advice_mode": "shadow",
        "created_at_us": 1, "updated_at_us": 2,
    },
    "attempts": {
        "run_id": "run_1", "attempt": 1, "key": "first", "resume_step": 0, "fingerprint": "{}", "created_at_us": 3,
    },
    "measurements": {
        "run_id": "run_1", "attempt": 1, "step": 7, "comparison": "trainer/rollout", "k3_kl": 1e-4,
        "tail_asymmetry_1": -2e-5, "tokens": 1000.0, "from_sample": False, "computed_at_us": 4,
    },
    "measurement_statistics": {
        "run_id": "run_1", "attempt": 1, "step": 7, "comparison": "trainer/rollout", "statistics_version": 1,
        "statistics": b"\x00FSST\xff",
    },
}  # fmt: skip


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """A transaction on the database."""
    engine = make_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def migrate(url: str, revision: str, *, down: bool = False) -> None:
    """Bring a database to a revision."""
    configuration = Config()
    configuration.set_main_option("script_location", _MIGRATIONS)
    with connected(url) as connection:
        configuration.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(configuration, revision)


def rows_of(url: str, table: str) -> list[dict[str, object]]:
    """Everything in a table."""
    with connected(url) as connection:
        return [dict(row) for row in connection.execute(sa.text(f"SELECT * FROM {table}")).mappings()]


def fill_old(url: str) -> None:
    """A run with a measured step, as the release before left it."""
    with connected(url) as connection:
        for table, row in OLD_ROWS.items():
            columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
            connection.execute(sa.text(f"INSERT INTO {table} ({columns}) VALUES ({values})"), row)


def test_a_migrated_database_has_exactly_the_declared_tables(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert current_revision(connection) == newest_revision()
    engine.dispose()


def test_migrating_again_changes_nothing(database_url: str) -> None:
    upgrade(database_url)
    database = Database(database_url)
    with database.read() as session:
        assert current_revision(session.connection()) == newest_revision()
    database.close()


def test_a_database_in_a_folder_that_does_not_exist_is_made(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path}/not/there/foreshock.db")
    assert (tmp_path / "not/there/foreshock.db").exists()


def test_what_the_release_before_stored_is_kept_and_new_measures_are_null(empty_database: str) -> None:
    migrate(empty_database, _BEFORE)
    fill_old(empty_database)
    before = {table: rows_of(empty_database, table) for table in OLD_ROWS}
    upgrade(empty_database)
    after = {table: rows_of(empty_database, table) for table in OLD_ROWS}
    (old,), (new,) = before.pop("measurements"), after.pop("measurements")
    assert after == before
    assert {name: new[name] for name in old} == old
    assert new["k3_kl"] == 1e-4
    added = set(new) - set(old)
    assert {"pareto_k", "tail_asymmetry_ln2", "k3_kl_bootstrap_low"} <= added
    assert {new[name] for name in added} == {None}
    assert set(new) == set(measurements.c.keys())


def test_going_back_leaves_what_the_release_before_had(empty_database: str) -> None:
    migrate(empty_database, _BEFORE)
    fill_old(empty_database)
    before = rows_of(empty_database, "measurements")
    upgrade(empty_database)
    migrate(empty_database, _BEFORE, down=True)
    assert rows_of(empty_database, "measurements") == before


def test_revisions_are_one_chain() -> None:
    configuration = Config()
    configuration.set_main_option("script_location", _MIGRATIONS)
    scripts = ScriptDirectory.from_config(configuration)
    chain = [script.revision for script in scripts.walk_revisions()]
    assert scripts.get_heads() == [chain[0]]
    assert chain == sorted(chain, reverse=True)
    assert len(chain) == len(list(Path(_MIGRATIONS, "versions").glob("0*.py")))
