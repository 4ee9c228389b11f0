"""The migrations make exactly the tables that the code declares, on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from foreshock.errors import ConfigurationError
from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.opening import (
    MIGRATIONS,
    current_revision,
    newest_revision,
    prepare_database,
    upgrade,
)
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Attempt, Base
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.attempts import attempts_of_run
from foreshock_service.runs.runs import RunCreate, get_or_create_run


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


def test_missing_folder_of_the_database_is_created(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path}/not/there/foreshock.db")
    assert (tmp_path / "not/there/foreshock.db").exists()


def test_revisions_are_one_chain() -> None:
    configuration = Config()
    configuration.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(configuration)
    chain = [script.revision for script in scripts.walk_revisions()]
    assert scripts.get_heads() == [chain[0]]
    assert chain == sorted(chain, reverse=True)
    assert len(chain) == len(list(Path(MIGRATIONS, "versions").glob("0*.py")))


def test_upgrade_adds_the_column_of_a_new_measure(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE measurements DROP COLUMN k3_kl"))
    with pytest.raises(ConfigurationError, match=r"without the measure k3_kl.*run `foreshock upgrade`"):
        prepare_database(database_url, upgrade_older=False)
    prepare_database(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_attempts_of_the_schema_before_keep_the_order_of_their_numbers(database_url: str) -> None:
    """The service's clock was set back between two of them."""
    database = Database(database_url)

    def begin(session: Session) -> str:
        run, _ = get_or_create_run(session, EventBus(), UNRESTRICTED, RunCreate(key="a-run"))
        for number, created_at_us in enumerate((5, 9, 7), start=1):
            row = {"run_id": run.id, "attempt": number, "key": str(number), "resume_step": number, "fingerprint": {}}
            session.add(Attempt(**row, created_at_us=created_at_us))
        return run.id

    run_id = database.write(begin)
    upgrade(database_url, "0047")
    upgrade(database_url)
    with database.read() as session:
        assert [each.attempt for each in attempts_of_run(session, run_id)] == [1, 2, 3]
        assert session.scalars(select(Attempt.began_at_us).order_by(Attempt.attempt)).all() == [5, 9, 9]
    database.close()
