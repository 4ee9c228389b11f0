"""Temporary files: only their user may read them, and those that a crash left are removed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from foreshock_service.platform.store.tokens import LocalTokenStore


@pytest.fixture
def store(tmp_path: Path) -> LocalTokenStore:
    """An empty store."""
    return LocalTokenStore(tmp_path / "tokens")


def age(path: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def test_temporary_files_of_a_crash_are_removed_and_new_ones_stay(store: LocalTokenStore) -> None:
    new, old = store.temporary_file(), store.temporary_file()
    assert new.stat().st_mode & 0o777 == 0o600
    folder = new.parent / "of-a-process"
    folder.mkdir()
    (folder / "file").touch()
    for path in (old, folder):
        age(path, 2)
    assert store.remove_old_temporaries() == 2
    assert list(new.parent.iterdir()) == [new]


def test_a_folder_that_was_cleared_by_hand_is_made_again(store: LocalTokenStore) -> None:
    shutil.rmtree(store.temporary_file().parent)
    assert store.temporary_file().exists()


def test_nothing_is_made_before_the_first_file(store: LocalTokenStore) -> None:
    assert store.remove_old_temporaries() == 0
    assert not store.root.exists()
