"""Commands refuse a database that they cannot use: one paragraph with the command that helps, and no traceback.

Each test runs the real command in a process of its own.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.opening import existing_database, newest_revision, prepare_database, upgrade
from tests.ports import free_port
from tests.service.postgres import PostgresCluster, find_programs
from tests.service.running import foreshock

COMMANDS = (("serve",), ("keys", "list"), ("remeasure", "--dry-run"))


def refusal_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    line, rest = done.stderr.split("\n", 1)
    assert rest == ""
    return line


OF_ANOTHER_VERSION = ("UPDATE alembic_version SET version_num = '0048'", "ALTER TABLE runs DROP COLUMN note")


def change(url: str, statement: str) -> None:
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.mark.parametrize("statement", OF_ANOTHER_VERSION)
def test_file_of_an_unreleased_version_is_refused_and_left_unchanged(tmp_path: Path, statement: str) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    upgrade(url)
    change(url, statement)
    # A version that was killed has left changes in its -wal file.
    killed = "import os, sqlite3; c = sqlite3.connect('foreshock.db'); c.execute('DELETE FROM runs'); "
    killed += "c.execute('CREATE TABLE theirs (a)'); c.commit(); os._exit(0)"
    subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, check=True)
    data = ("foreshock.db", "foreshock.db-wal")
    before = {name: (tmp_path / name).read_bytes() for name in data}
    assert len(before["foreshock.db-wal"]) > 0
    refused = refusal_of(foreshock(tmp_path, "serve"))
    assert f"{tmp_path}/foreshock.db was made by an unreleased or newer version of Foreshock" in refused
    assert f"this release has {newest_revision()}) and is left unchanged" in refused
    assert f"move {tmp_path}/foreshock.db* to another folder" in refused
    assert "FORESHOCK_DATABASE_URL" in refused
    with pytest.raises(ConfigurationError, match="unreleased or newer version"), existing_database(url):
        pass
    assert {name: (tmp_path / name).read_bytes() for name in data} == before


def dump(url: str) -> list[str]:
    dumped = subprocess.run([find_programs() / "pg_dump", url], capture_output=True, text=True, check=True)
    # Commands of psql hold a random word.
    return [line for line in dumped.stdout.splitlines() if not line.startswith("\\")]


@pytest.mark.parametrize("statement", OF_ANOTHER_VERSION)
def test_postgresql_of_an_unreleased_version_is_refused_and_unchanged(
    postgres: PostgresCluster, statement: str
) -> None:
    url = postgres.new_database()
    upgrade(url)
    change(url, statement)
    before = dump(url)
    with pytest.raises(ConfigurationError, match=r"unreleased or newer version .*`createdb NAME`"):
        prepare_database(url)
    assert dump(url) == before


def test_file_of_a_release_with_more_measures_is_opened(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/not/there/foreshock.db"
    upgrade(url)
    change(url, "ALTER TABLE measurements ADD COLUMN later_measure DOUBLE")
    prepare_database(url)
    with existing_database(url) as database:
        database.check_writable()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_unreachable_database_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    url = f"postgresql://me:secret-word@127.0.0.1:{free_port()}/foreshock"
    refused = refusal_of(foreshock(tmp_path, *words, FORESHOCK_DATABASE_URL=url))
    assert "cannot be used" in refused
    assert "Connection refused" in refused
    assert "correct FORESHOCK_DATABASE_URL" in refused
    assert "secret-word" not in refused


def test_server_that_never_answers_is_refused_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/foreshock?connect_timeout=2"
        begin = time.monotonic()
        refused = refusal_of(foreshock(tmp_path, "keys", "list", FORESHOCK_DATABASE_URL=url))
    assert "timeout" in refused
    assert time.monotonic() - begin < 240


def test_wrong_password_and_missing_database_are_told_apart(tmp_path: Path, postgres: PostgresCluster) -> None:
    postgres.new_role("guarded", "right-word")
    right = postgres.url("postgres").replace("foreshock@", "guarded:right-word@")
    psycopg.connect(right).close()
    wrong = right.replace("right-word", "wrong-word")
    refused = refusal_of(foreshock(tmp_path, "serve", FORESHOCK_DATABASE_URL=wrong))
    assert 'password authentication failed for user "guarded"' in refused
    assert "the user or the password in FORESHOCK_DATABASE_URL is wrong" in refused
    assert "wrong-word" not in refused
    missing = foreshock(tmp_path, "serve", FORESHOCK_DATABASE_URL=postgres.url("not_there"))
    assert "createdb" in refusal_of(missing)
    # It may connect, and may make no table.
    powerless = foreshock(tmp_path, "serve", FORESHOCK_DATABASE_URL=right)
    assert "may not make tables" in refusal_of(powerless)


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    # Below a file no folder can be made, whoever runs this: root ignores permissions.
    (tmp_path / "file").write_text("a file")
    below = f"sqlite:///{tmp_path}/file/data/foreshock.db"
    refused = refusal_of(foreshock(tmp_path, "serve", FORESHOCK_DATABASE_URL=below))
    assert f"the folder {tmp_path}/file/data of the database cannot be made or written" in refused
    store = refusal_of(foreshock(tmp_path, "serve", FORESHOCK_STORE_URL=f"{tmp_path}/file/tokens"))
    assert f"the token store {tmp_path}/file/tokens cannot be written" in store
    assert "FORESHOCK_STORE_URL" in store


def test_database_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path}/foreshock.db")
    (tmp_path / "foreshock.db").chmod(0o444)
    tmp_path.chmod(0o555)
    # Root may write to any file, unless it gives that up.
    before = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    refused = refusal_of(foreshock(tmp_path, "serve", before=before))
    tmp_path.chmod(0o755)
    assert "give this user write access to the file and its folder" in refused


def test_other_file_and_tables_of_another_program_are_refused(tmp_path: Path) -> None:
    (tmp_path / "foreshock.db").write_text("not a database, but long enough to be read as a header\n" * 40)
    assert "another kind of file" in refusal_of(foreshock(tmp_path, "keys", "list"))
    (tmp_path / "foreshock.db").unlink()
    engine = make_engine(f"sqlite:///{tmp_path}/foreshock.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE customers (name TEXT)")
    engine.dispose()
    assert "belongs to another program" in refusal_of(foreshock(tmp_path, "serve"))
