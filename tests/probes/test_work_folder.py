"""The folder of a worker's files, and what becomes of those that killed workers left."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from foreshock_probes.work_folder import remove_left_folders, work_folder

HOLD_UNTIL_KILLED = """
import time
from foreshock_probes.work_folder import work_folder
with work_folder() as folder:
    (folder / "rollouts.parquet").write_bytes(b"private")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which workers make theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def make_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600,) * 2)


def test_folder_is_removed_at_the_end(temporary_folder: Path) -> None:
    with work_folder() as folder:
        (folder / "rollouts.parquet").write_bytes(b"private")
    assert list(temporary_folder.iterdir()) == []


def test_next_worker_removes_the_folder_of_a_killed_one_and_no_living_ones(temporary_folder: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", HOLD_UNTIL_KILLED], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        killed, living = (Path(str(worker.stdout and worker.stdout.readline()).strip()) for worker in workers)
        workers[0].kill()
        workers[0].wait()
        for folder in (killed, living):
            make_old(folder)
        with work_folder() as own:
            assert set(temporary_folder.iterdir()) == {living, own}
        assert (living / "rollouts.parquet").is_file()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_young_folders_and_those_of_others_stay(temporary_folder: Path) -> None:
    young = temporary_folder / "foreshock-worker-young"
    other = temporary_folder / "other-program"
    elsewhere = temporary_folder / "elsewhere"
    link = temporary_folder / "foreshock-worker-link"
    for folder in (young, other, elsewhere):
        folder.mkdir()
    link.symlink_to(elsewhere)
    for folder in (other, elsewhere):
        make_old(folder)
    remove_left_folders()
    assert set(temporary_folder.iterdir()) == {young, other, elsewhere, link}


def test_without_locks_a_worker_has_its_folder_and_removes_no_other(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    left = temporary_folder / "foreshock-worker-left"
    left.mkdir()
    make_old(left)
    monkeypatch.setattr("foreshock_probes.work_folder.fcntl.flock", refuse)
    with work_folder() as own:
        assert set(temporary_folder.iterdir()) == {left, own}
    assert list(temporary_folder.iterdir()) == [left]
