"""The migrations make exactly the tables that the code declares, on both databases."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database import opening
from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.tables import Base


def assert_has_the_declared_tables(connection: Connection) -> None:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    assert compare_metadata(context, Base.metadata) == []
    assert opening.current_revision(connection) == opening.newest_revision()


def test_a_migrated_database_has_exactly_the_declared_tables(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.connect() as connection:
        assert_has_the_declared_tables(connection)
    opening.upgrade(database_url)
    with engine.connect() as connection:
        assert_has_the_declared_tables(connection)
    engine.dispose()


def test_revisions_are_one_chain() -> None:
    scripts = ScriptDirectory(str(opening.MIGRATIONS))
    chain = [script.revision for script in scripts.walk_revisions()]
    assert scripts.get_heads() == [chain[0]]
    assert chain == sorted(chain, reverse=True)


def test_upgrade_adds_the_column_of_a_new_measure(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE measurements DROP COLUMN k3_kl"))
    with pytest.raises(ConfigurationError, match=r"without the measure k3_kl.*start `foreshock serve`"):
        opening.prepare_database(database_url, upgrade_older=False)
    opening.prepare_database(database_url)
    with engine.connect() as connection:
        assert_has_the_declared_tables(connection)
    engine.dispose()
