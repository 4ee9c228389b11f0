"""The token store: files appear whole or not at all, only inside it, and what a crash leaves is removed."""

import os
import shutil
import time
from pathlib import Path

import pytest

from foreshock.errors import ConfigurationError
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import LocalTokenStore, open_store, shard_file_name


@pytest.fixture
def store(tmp_path: Path) -> LocalTokenStore:
    return LocalTokenStore(tmp_path / "tokens")


def test_temporary_files_of_a_crash_are_removed_and_new_ones_stay(store: LocalTokenStore) -> None:
    new, old = store.temporary_file(), store.temporary_file()
    assert new.stat().st_mode & 0o777 == 0o600
    then = time.time() - 2 * 3600
    os.utime(old, (then, then))
    assert store.remove_old_temporaries() == 1
    assert list(new.parent.iterdir()) == [new]


def test_a_folder_that_was_cleared_by_hand_is_made_again(store: LocalTokenStore) -> None:
    shutil.rmtree(store.temporary_file().parent)
    assert store.temporary_file().exists()


def test_nothing_is_made_before_the_first_file(store: LocalTokenStore) -> None:
    assert store.remove_old_temporaries() == 0
    store.remove("run_1/0001/gone.parquet")
    assert not store.root.exists()


def test_a_published_file_has_its_name_and_the_temporary_one_is_gone(store: LocalTokenStore) -> None:
    temporary = store.temporary_file()
    temporary.write_bytes(b"tokens")
    name = shard_file_name("run_1", 1, 20, 3, "sha256:" + "a" * 64)
    assert not store.path_of(name).exists()
    store.publish(temporary, name)
    assert store.path_of(name).read_bytes() == b"tokens"
    assert not temporary.exists()
    assert name.startswith("run_1/0001/000000020/00003-aaaaaaaaaaaaaaaa-")
    assert name != shard_file_name("run_1", 1, 20, 3, "sha256:" + "a" * 64), "another upload of the body"


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/passwd", "a/../b"])
def test_a_name_that_leaves_the_store_is_refused(store: LocalTokenStore, name: str) -> None:
    with pytest.raises(ValueError, match="not inside"):
        store.path_of(name)
    with pytest.raises(ValueError, match="not inside"):
        store.remove(name)


def test_read_only_store_is_reported(store: LocalTokenStore) -> None:
    store.check_writable()
    shutil.rmtree(store.root / "temporary")
    (store.root / "temporary").touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        store.check_writable()


def test_store_url_that_is_not_a_folder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="FORESHOCK_STORE_URL"):
        open_store(Settings(store_url="ftp://bucket/prefix"))
