"""Temporary files: those of a process that lives stay, those of one that was killed go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foreshock_service.platform.store.tokens import TemporaryFiles

_OWNER = """
import sys, time
from pathlib import Path
from foreshock_service.platform.store.tokens import TemporaryFiles
files = TemporaryFiles(Path(sys.argv[1]))
print(files.new(), files.new(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The folder that processes share."""
    return tmp_path / "temporary"


def test_files_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(shared: Path) -> None:
    files = TemporaryFiles(shared)
    own = files.new()
    with subprocess.Popen([sys.executable, "-c", _OWNER, str(shared)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = [Path(name) for name in owner.stdout.readline().split()]
        assert len(theirs) == 2
        assert files.remove_abandoned() == 0
        assert all(path.exists() for path in theirs)
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
    assert files.remove_abandoned() == 2
    assert not any(path.exists() for path in theirs)
    assert own.exists()
    assert {path.name for path in shared.iterdir()} == {own.parent.name, f"{own.parent.name}.lock"}


def test_close_leaves_nothing_and_a_later_file_makes_a_new_folder(shared: Path) -> None:
    files = TemporaryFiles(shared)
    files.new()
    files.close()
    assert not list(shared.iterdir())
    assert files.new().exists()
    files.close()


def test_a_folder_that_was_cleared_by_hand_is_made_again(shared: Path) -> None:
    files = TemporaryFiles(shared)
    files.new()
    shutil.rmtree(shared)
    assert files.new().exists()


def test_nothing_is_made_before_the_first_file(shared: Path) -> None:
    files = TemporaryFiles(shared)
    assert files.remove_abandoned() == 0
    assert not os.path.lexists(shared)


def test_a_name_stays_marked_until_the_last_block_that_marks_it_ends(shared: Path) -> None:
    files, others = TemporaryFiles(shared), TemporaryFiles(shared)
    with files.marked("a/b"):
        with files.marked("a/b"), files.marked("c"):
            assert others.is_marked("c")
        assert others.is_marked("a/b")
        assert not others.is_marked("c")
    assert not others.is_marked("a/b")
    assert [path.name for path in next(shared.glob("*/")).iterdir()] == []


def test_names_are_marked_where_there_are_no_links_and_in_a_folder_that_was_cleared(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TemporaryFiles(shared)
    files.new()
    shutil.rmtree(shared)
    with files.marked("a"):
        assert files.is_marked("a")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    with files.marked("b"):
        assert files.is_marked("b")
    assert not files.is_marked("b")
