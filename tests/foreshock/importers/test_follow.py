"""A follower returns each finished dump once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from foreshock.importers import FORMATS
from foreshock.importers.follow import Follower, ImportRecord, signature_of
from tests.foreshock.importers.make_dumps import DUMPS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def steps(follower: Follower) -> list[int]:
    return [dump.step for dump, _ in follower.finished()]


def follower_of(name: str, folder: Path, tmp_path: Path, clock: Clock) -> Follower:
    return Follower(FORMATS[name], folder, ImportRecord(tmp_path / "record.json"), clock=clock)


def test_file_without_marker_must_settle(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    follower = follower_of("nemo-rl", folder, tmp_path, clock)
    assert steps(follower) == []
    whole = (DUMPS / "nemo-rl" / "train_data_step1.jsonl").read_bytes()
    file = folder / "train_data_step1.jsonl"
    # Cut at the end of a line: only time tells that it is not complete.
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    assert steps(follower) == []
    clock.now = 4.0
    file.write_bytes(whole)
    assert steps(follower) == []
    clock.now = 8.0
    assert steps(follower) == []
    assert follower.waiting == {1: "its files are new"}
    clock.now = 9.0
    assert steps(follower) == [1]
    file.write_bytes(whole[:-5])
    steps(follower)
    clock.now = 100.0
    assert steps(follower) == []
    assert follower.waiting == {1: "train_data_step1.jsonl is half-written"}


def test_old_file_need_not_settle(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "dumps"
    shutil.copytree(DUMPS / "nemo-rl", folder)
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    assert steps(follower_of("nemo-rl", folder, tmp_path, clock)) == [1, 45]


def test_joined_folders_wait_for_both(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "dumps"
    shutil.copytree(DUMPS / "slime", folder)
    (folder / "train_data" / "45.pt").unlink()
    follower = follower_of("slime", folder, tmp_path, clock)
    steps(follower)
    clock.now = 10.0
    assert steps(follower) == [1]
    assert follower.waiting == {45: "train_data/45.pt is missing"}


def test_recorded_and_refused_steps_are_not_returned_again(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "dumps"
    shutil.copytree(DUMPS / "prime-rl", folder)
    follower = follower_of("prime-rl", folder, tmp_path, clock)
    (one, signature), (other, other_signature) = follower.finished()
    ImportRecord(tmp_path / "record.json").add(one.step, signature)
    follower = follower_of("prime-rl", folder, tmp_path, clock)
    assert steps(follower) == [45]
    follower.refuse(other, other_signature)
    assert steps(follower) == []
    other.files[0].write_bytes(other.files[0].read_bytes() + b"\n")
    assert steps(follower) == [45]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"steps": {"1": [["a", 1, 2]]', "\x00"])
def test_damaged_record_is_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    record = ImportRecord(path)
    assert len(record) == 0
    (tmp_path / "a").write_text("x")
    record.add(1, signature_of([tmp_path / "a"]))
    assert ImportRecord(path).signature(1) == signature_of([tmp_path / "a"])
