"""The database's schema: upgrade it to the newest revision, and read the revision that it has.

A new table or column: change the classes in `service/platform/database/tables`, then write the next migration with
`python -m foreshock_service.platform.database.schema draft "what changes"`, from the difference between an empty,
migrated SQLite database and the classes. A test compares the migrated database with these classes.

Until release 0.1 the first migration (0040) is changed instead. Databases of the schemas before it (0003 to 0039) are
converted by `migrations/earlier_schemas.py`, whose docstring says what to add there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import load_python_file
from sqlalchemy import Connection, event, text

from foreshock_service.platform.database.engine import make_engine

_SERVICE = Path(__file__).parents[2]
# A wheel carries them inside the package `service`; in a checkout they are at the top of the repository.
MIGRATIONS = next(path for path in (_SERVICE / "migrations", _SERVICE.parent / "migrations") if path.is_dir())
EARLIER = tuple(f"{number:04d}" for number in range(1, 40))
"""Revisions before the first migration, which only databases of unreleased versions have."""

OLDEST_CONVERTED = "0003"
# Any number that no other program takes as its PostgreSQL advisory lock.
_ADVISORY_LOCK = 0x464F5245


def upgrade(database_url: str, revision: str = "head") -> None:
    """Create or migrate the database to a revision, the newest by default; several services may do so at once.

    An older revision than the database has is a downgrade.
    """
    engine = make_engine(database_url)
    if engine.dialect.name == "sqlite":
        # To change a column of a table SQLite makes the table anew, which rows of other tables may point to.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = OFF").close())
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
            has = current_revision(connection)
            if has in EARLIER:
                load_python_file(str(MIGRATIONS), "earlier_schemas.py").convert(connection, has)
                _set_revision(connection, newest_revision())
                has = newest_revision()
            newer = has is not None and revision != "head" and revision in _revisions_before(has)
            (command.downgrade if newer else command.upgrade)(_configuration(connection), revision)
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


def _set_revision(connection: Connection, revision: str | None) -> None:
    connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def _revisions_before(revision: str) -> frozenset[str]:
    scripts = ScriptDirectory(str(MIGRATIONS))
    return frozenset(script.revision for script in scripts.iterate_revisions(revision, "base")) - {revision}


def _configuration(connection: Connection) -> Config:
    configuration = Config()
    configuration.set_main_option("script_location", str(MIGRATIONS))
    configuration.attributes["connection"] = connection
    return configuration


def _draft(message: str) -> None:
    number = f"{int(newest_revision() or EARLIER[-1]) + 1:04d}"
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(f"sqlite:///{folder}/draft.db")
        with engine.begin() as connection:
            if newest_revision() is not None:
                command.upgrade(_configuration(connection), "head")
            command.revision(_configuration(connection), message, autogenerate=True, rev_id=number)
        engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "draft":
        raise SystemExit('usage: python -m foreshock_service.platform.database.schema draft "what changes"')
    _draft(sys.argv[2])
