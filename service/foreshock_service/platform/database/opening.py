"""Open a database: check that it answers, can be written, and has a schema that this release knows; then migrate it.

Every fault becomes a ConfigurationError that says what was found and which command or setting helps.

`python -m foreshock_service.platform.database.opening draft "what changes"` drafts the next migration: the differences
between an empty, migrated SQLite database and the classes in `tables`. The column of a measure needs no migration:
`upgrade` adds it.
"""

import errno
import fcntl
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Double, NullPool, create_engine, event, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DatabaseError, DBAPIError, InterfaceError, OperationalError

from foreshock.errors import ConfigurationError
from foreshock.measures.registry import MEASURES
from foreshock_service.platform.database import session, tables
from foreshock_service.platform.database.engine import make_engine, parse_database_url

_SERVICE = Path(__file__).parents[2]
# A wheel carries them inside the package; in a checkout they are at the top of the repository.
MIGRATIONS = next(path for path in (_SERVICE / "migrations", _SERVICE.parents[1] / "migrations") if path.is_dir())
# Any number that no other program takes as its PostgreSQL advisory lock.
_ADVISORY_LOCK = 0x464F5245
# Errors of file systems without locks; there a service starts without the lock.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
# A host that drops packets never answers; the operating system would wait for minutes.
_CONNECT_SECONDS = "10"


def prepare_database(database_url: str, *, upgrade_older: bool = True) -> None:
    """Create a missing database or migrate it to the schema of this release, and check that it can be written.

    Raises ConfigurationError if it cannot be reached, opened or written, if its schema is of no release up to this one,
    or if it is an older release's and `upgrade_older` is False.
    """
    with _reported(database_url):
        if not is_missing(database_url):
            has = _check(database_url)
            if has not in (None, newest_revision()) and not upgrade_older:
                raise _older(database_url, str(has))
        upgrade(database_url)


@contextmanager
def existing_database(database_url: str) -> Iterator[session.Database]:
    """Open the service's database for a command; create and migrate nothing. Raises ConfigurationError."""
    with _reported(database_url):
        if is_missing(database_url):
            raise ConfigurationError(
                f"there is no database {shown(database_url)}: FORESHOCK_DATABASE_URL must be the service's"
            )
        revision = _check(database_url)
        if revision is None:
            raise ConfigurationError(
                f"the database {shown(database_url)} has no tables: FORESHOCK_DATABASE_URL must be the service's; "
                "`foreshock serve` makes the tables of a new one"
            )
        if revision != newest_revision():
            raise _older(database_url, revision)
    database = session.Database(database_url)
    try:
        yield database
    finally:
        database.close()


def upgrade(database_url: str) -> None:
    """Create or migrate the database; several services may do so at once."""
    engine = make_engine(database_url)
    if engine.dialect.name == "sqlite":
        # SQLite rebuilds a table to change a column, while rows of other tables may point to it.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = OFF").close())
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
            command.upgrade(_configuration(connection), "head")
            kind = Double().compile(connection.dialect)
            for column in _missing_measures(connection):
                connection.execute(text(f"ALTER TABLE measurements ADD COLUMN {column} {kind}"))
    finally:
        engine.dispose()


def _missing_measures(connection: Connection) -> list[str]:
    found = {column["name"] for column in inspect(connection).get_columns("measurements")}
    return [measure.column for measure in MEASURES if measure.column not in found]


def current_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str | None:
    return ScriptDirectory(str(MIGRATIONS)).get_current_head()


def _configuration(connection: Connection) -> Config:
    configuration = Config()
    configuration.set_main_option("script_location", str(MIGRATIONS))
    configuration.attributes["connection"] = connection
    return configuration


@contextmanager
def only_service(database_url: str) -> Iterator[None]:
    """Lock a SQLite file for this service during a `with` block; PostgreSQL allows any number of services.

    Two services on one file would both do each background job. The lock ends with the process, and its decoders do not
    inherit it. Commands that run beside a service take no lock. Raises ConfigurationError if another service holds it.
    """
    url = parse_database_url(database_url)
    if url.get_backend_name() != "sqlite":
        yield
        return
    path = f"{url.database}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"the file {path} cannot be opened ({error.strerror}): give this user write access to it and its folder, "
            "or delete it, if another user made it and no service runs"
        ) from None
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace") or "unknown"
                raise ConfigurationError(
                    f"another service (process {holder}) uses the database {url.database}: stop it first, give this "
                    "one a database of its own with FORESHOCK_DATABASE_URL, or use PostgreSQL, which several services "
                    "may share"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _check(database_url: str) -> str | None:
    """Return the revision of a database that can be written, None if it is empty; raises ConfigurationError.

    If the newest revision lacks the column of a measure, the text names it and equals no revision.
    """
    with _read_only(database_url) as connection:
        revision = current_revision(connection)
        if revision is None:
            _check_empty(connection, database_url)
        elif not _is_of_a_release(connection, revision):
            raise _unreleased(database_url, revision)
        elif revision == newest_revision() and (missing := _missing_measures(connection)):
            revision = f"{revision} without the measure {missing[0]}"
    database = session.Database(_impatient(database_url), connections=2)
    try:
        database.check_writable()
    except session.ReadOnly:
        raise ConfigurationError(
            "the PostgreSQL server is read-only (a standby, or default_transaction_read_only): "
            "FORESHOCK_DATABASE_URL must name the primary"
        ) from None
    finally:
        database.close()
    return revision


@contextmanager
def _read_only(database_url: str) -> Iterator[Connection]:
    """Connect to a database that may be another version's: no byte of it changes."""
    url = _impatient(database_url)
    if url.get_backend_name() == "sqlite":
        # A connection that could write would move the -wal file of a killed service into the database.
        file = f"{Path(str(url.database)).absolute().as_uri()}?mode=ro"
        engine = create_engine(url, creator=lambda: sqlite3.connect(file, uri=True, timeout=30), poolclass=NullPool)
    else:
        engine = make_engine(url, connections=2)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _is_of_a_release(connection: Connection, revision: str) -> bool:
    """Return whether this release or an earlier one made the schema.

    A schema of the newest revision also has the columns of this release, but for those of measures.
    """
    if revision != newest_revision():
        return revision in {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    measures = {measure.column for measure in MEASURES}
    found = {
        table: {column["name"] for column in columns}
        for (_, table), columns in inspect(connection).get_multi_columns().items()
    }
    return all(
        # Another release may have more measures.
        set(table.columns.keys()) - measures <= found.get(name, set())
        if name == "measurements"
        else set(table.columns.keys()) == found.get(name)
        for name, table in tables.Base.metadata.tables.items()
    )


def _check_empty(connection: Connection, database_url: str) -> None:
    found = set(inspect(connection).get_table_names()) - {"alembic_version"}  # All that a killed first start may leave.
    if connection.dialect.name == "postgresql":  # Whose schema may be shared; a SQLite file has one program.
        found &= set(tables.Base.metadata.tables)
    if found:
        raise ConfigurationError(
            f"the database {shown(database_url)} has tables ({', '.join(sorted(found)[:3])}) and no revision of "
            "Foreshock: it belongs to another program and is left unchanged; give Foreshock a database of its own"
        )


def is_missing(database_url: str) -> bool:
    url = parse_database_url(database_url)
    return url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists()


def _older(database_url: str, revision: str) -> ConfigurationError:
    return ConfigurationError(
        f"the database {shown(database_url)} has schema {revision} and this release requires {newest_revision()}: "
        "stop the service of the older release, make a backup, then start `foreshock serve`, which migrates it"
    )


def _unreleased(database_url: str, revision: str) -> ConfigurationError:
    where = shown(database_url)
    if parse_database_url(database_url).get_backend_name() == "sqlite":
        help_ = f"move {where}* to another folder and the new database is made at {where}, or set "
        help_ += "FORESHOCK_DATABASE_URL to the file where it is to be made"
    else:
        help_ = (
            "make another database (`createdb NAME`) and set FORESHOCK_DATABASE_URL to it; the tables are made there"
        )
    return ConfigurationError(
        f"the database {where} was made by an unreleased or newer version of Foreshock (schema {revision}, this "
        f"release has {newest_revision()}) and is left unchanged: {help_}"
    )


@contextmanager
def _reported(database_url: str) -> Iterator[None]:
    """Raise ConfigurationError for failures of the database and of its folder."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise ConfigurationError(_unusable(database_url, error)) from None
    except DatabaseError as error:
        if parse_database_url(database_url).get_backend_name() == "sqlite":
            raise ConfigurationError(_unusable(database_url, error)) from None
        if getattr(error.orig, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE:
            raise ConfigurationError(
                f"the user of {shown(database_url)} may not make tables ({_message(error)}): "
                "make it the owner of its database (`ALTER DATABASE … OWNER TO …`)"
            ) from None
        raise
    except OSError as error:
        folder = Path(str(parse_database_url(database_url).database)).absolute().parent
        raise ConfigurationError(
            f"the folder {folder} of the database cannot be made or written ({error.strerror}): "
            "give this user write access to it, or set FORESHOCK_DATABASE_URL to another place"
        ) from None


_INSUFFICIENT_PRIVILEGE = "42501"
# A regular expression for the database's message, and what to do; the first match counts.
_HELP = (
    ("password authentication failed", "the user or the password in FORESHOCK_DATABASE_URL is wrong"),
    ("no password supplied", "FORESHOCK_DATABASE_URL has no password: postgresql://USER:PASSWORD@HOST/DATABASE"),
    (r"no pg_hba\.conf entry", "the server does not let this user in from this machine: add a line to its pg_hba.conf"),
    ('role ".*" does not exist', "make the user first: `createuser USER`"),
    ('database ".*" does not exist', "make the database first: `createdb DATABASE`"),
    ("too many", "the server has no free connection: lower FORESHOCK_DATABASE_CONNECTIONS or raise max_connections"),
    ("is locked", "another process keeps it locked: end that process, then start again"),
    ("readonly|unable to open", "give this user write access to the file and its folder"),
    ("not a database", "FORESHOCK_DATABASE_URL names another kind of file, or the file is damaged: restore a backup"),
    ("malformed", "the file is damaged: restore a backup"),
    ("disk is full", "free space, then start again"),
    ("", "start it, or correct FORESHOCK_DATABASE_URL"),
)


def _unusable(database_url: str, error: DBAPIError) -> str:
    said = _message(error)
    what_to_do = next(text for sign, text in _HELP if re.search(sign, said))
    return f"the database {shown(database_url)} cannot be used ({said}): {what_to_do}"


def _message(error: DBAPIError) -> str:
    return " ".join(str(error.orig).split())


def shown(database_url: str) -> str:
    """Return the database as messages show it: its URL without the password, or the whole path of a SQLite file."""
    url = parse_database_url(database_url)
    if url.get_backend_name() == "sqlite":
        return str(Path(str(url.database)).absolute())
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


def _impatient(database_url: str) -> URL:
    url = parse_database_url(database_url)
    if url.get_backend_name() == "sqlite" or "connect_timeout" in url.query:
        return url
    return url.update_query_dict({"connect_timeout": _CONNECT_SECONDS})


def _draft(message: str) -> None:
    # Three digits: unreleased versions had four, so that their databases are told apart.
    number = f"{int(newest_revision() or 0) + 1:03d}"
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(f"sqlite:///{folder}/draft.db")
        with engine.begin() as connection:
            command.upgrade(_configuration(connection), "head")
            command.revision(_configuration(connection), message, autogenerate=True, rev_id=number)
        engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "draft":
        raise SystemExit('usage: python -m foreshock_service.platform.database.opening draft "what changes"')
    _draft(sys.argv[2])
