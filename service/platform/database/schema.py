"""The database's schema: upgrade it to the newest revision, and read the revision that it has.

`python -m foreshock_service.platform.database.schema draft "what changes"` writes the next migration into
`migrations/versions`, from the difference between an empty, migrated SQLite database and the tables in
`service/platform/database/tables`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from foreshock_service.platform.database.engine import make_engine

_SERVICE = Path(__file__).parents[2]
# A wheel carries them inside the package `service`; in a checkout they are at the top of the repository.
MIGRATIONS = next(path for path in (_SERVICE / "migrations", _SERVICE.parent / "migrations") if path.is_dir())
# Any number that no other program takes as its PostgreSQL advisory lock.
_ADVISORY_LOCK = 0x464F5245


def upgrade(database_url: str, revision: str = "head") -> None:
    """Create or migrate the database to a revision, the newest by default; several services may do so at once.

    An older revision than the database has is a downgrade.
    """
    engine = make_engine(database_url)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
            configuration = _configuration(connection)
            has = current_revision(connection)
            newer = has is not None and revision != "head" and revision in _revisions_before(has)
            (command.downgrade if newer else command.upgrade)(configuration, revision)
    finally:
        engine.dispose()


def current_revision(connection: Connection) -> str | None:
    """Return the revision of the database; None if it was never migrated."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str | None:
    """Return the revision that this release requires."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head()


def known_revisions() -> frozenset[str]:
    """Return every revision that this release knows."""
    return frozenset(script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions())


def _revisions_before(revision: str) -> frozenset[str]:
    scripts = ScriptDirectory(str(MIGRATIONS))
    return frozenset(script.revision for script in scripts.iterate_revisions(revision, "base")) - {revision}


def _configuration(connection: Connection) -> Config:
    configuration = Config()
    configuration.set_main_option("script_location", str(MIGRATIONS))
    configuration.attributes["connection"] = connection
    return configuration


def _draft(message: str) -> None:
    number = f"{sum(1 for _ in (MIGRATIONS / 'versions').glob('0*.py')) + 1:04d}"
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(f"sqlite:///{folder}/draft.db")
        with engine.begin() as connection:
            if number != "0001":
                command.upgrade(_configuration(connection), "head")
            command.revision(_configuration(connection), message, autogenerate=True, rev_id=number)
        engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "draft":
        raise SystemExit('usage: python -m foreshock_service.platform.database.schema draft "what changes"')
    _draft(sys.argv[2])
