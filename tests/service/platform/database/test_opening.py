"""Commands refuse a database that they cannot use: one paragraph with the command that helps, and no traceback.

Each test runs the real command in a process of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.opening import (
    current_revision,
    existing_database,
    newest_revision,
    upgrade,
    upgrade_command,
)
from tests.ports import free_port
from tests.service.postgres import PostgresCluster
from tests.service.running import foreshock

COMMANDS = (("serve",), ("keys", "list"), ("remeasure", "--dry-run"))


def refusal_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one paragraph of a refusal."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    line, rest = done.stderr.split("\n", 1)
    assert rest == ""
    return line


def set_revision(url: str, revision: str) -> None:
    """Write a revision into a migrated database."""
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{revision}'")
    engine.dispose()


def revision_of(url: str) -> str | None:
    """Return the revision of a database."""
    engine = make_engine(url)
    with engine.begin() as connection:
        revision = current_revision(connection)
    engine.dispose()
    return revision


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_newer_revision_is_refused_and_left_as_it_is(tmp_path: Path, words: tuple[str, ...]) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    upgrade(url)
    set_revision(url, "9999")
    (tmp_path / "tokens").mkdir()
    refused = refusal_of(foreshock(tmp_path, *words))
    assert f"revision 9999, and this release knows revisions up to {newest_revision()}" in refused
    assert f"foreshock upgrade --to {newest_revision()}" in refused
    assert revision_of(url) == "9999"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_older_revision_names_the_command_that_migrates(tmp_path: Path, words: tuple[str, ...]) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    upgrade(url)
    set_revision(url, "0015")
    refused = refusal_of(foreshock(tmp_path, *words, FORESHOCK_UPGRADE_AT_START="false"))
    assert f"has revision 0015 and this release requires {newest_revision()}" in refused
    assert "run `foreshock upgrade`" in refused
    assert revision_of(url) == "0015"


def test_upgrade_migrates_to_the_newest_or_a_named_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", url)
    words = iter(("new database", "database", "database"))
    for revision, expected in ((None, newest_revision()), ("0040", "0040"), (None, newest_revision())):
        upgrade_command(revision)
        assert revision_of(url) == expected
        assert capsys.readouterr().out == f"the {next(words)} {tmp_path}/foreshock.db has revision {expected}\n"
    with existing_database(url) as database:
        database.check_writable()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_schema_that_is_too_old_names_the_release_that_migrates_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    upgrade(url)
    set_revision(url, "0002")
    refused = refusal_of(foreshock(tmp_path, *words))
    assert "has revision 0002, and this release converts databases from revision 0003 on" in refused
    assert "run `foreshock upgrade` with Foreshock 0.1.0 at commit edd6602 first" in refused
    assert revision_of(url) == "0002"


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
    powerless = foreshock(tmp_path, "upgrade", FORESHOCK_DATABASE_URL=right)
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
        connection.exec_driver_sql("CREATE TABLE runs (theirs TEXT)")
    engine.dispose()
    assert "belongs to another program" in refusal_of(foreshock(tmp_path, "serve"))
