"""A new SQLite file, and what SQLite keeps beside it, is readable by its user only."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.opening import existing_database, prepare_database


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_new_file_and_those_beside_it_are_private(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/foreshock.db"
    prepare_database(url)
    with existing_database(url) as database, database.read() as session:
        session.connection()
        database.write(lambda writing: None)
        found = modes(tmp_path)
    assert {"foreshock.db", "foreshock.db-wal", "foreshock.db-shm"} <= set(found)
    assert set(found.values()) == {0o600}


def test_file_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "foreshock.db"
    path.touch(0o640)
    prepare_database(f"sqlite:///{path}")
    assert modes(tmp_path)["foreshock.db"] == 0o640


def test_file_is_made_by_the_first_connection_only(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path}/foreshock.db")
    assert modes(tmp_path) == {}
    engine.connect().close()
    assert modes(tmp_path)["foreshock.db"] == 0o600
    engine.dispose()
