"""The migrations make exactly the tables that the code declares, on both databases."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from service.database.engine import make_engine
from service.database.schema import current_revision, newest_revision, upgrade
from service.database.session import Database
from service.database.tables import Base


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
