"""`foreshock check` finds every way in which files and catalogue can differ, and changes nothing."""

import os
import shutil
import time
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.maintenance.check import check, check_store
from foreshock_service.maintenance.stored_files import maintenance_context
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import score_file_name
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import list_files


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    """A run with three steps of one shard."""
    sender = start_run(http)
    for step in range(3):
        assert sender.put_shard(step, encode_rollouts(make_batch(4, seed=step))).status_code == 201
    return sender


@pytest.fixture
def files(sender: Sender, settings: Settings) -> list[Path]:
    return [Path(settings.store_url) / name for name in list_files(settings)]


def problems_of(settings: Settings) -> list[str]:
    """Return the problems of a store whose rows name three files."""
    with maintenance_context(settings) as context:
        checked, problems = check_store(context)
    assert checked == 3
    return problems


def test_the_command_counts_files_and_says_what_to_do(
    files: list[Path], settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    assert check() == 0
    assert capsys.readouterr().out == "3 files checked, 0 problems\n"
    files[0].unlink()
    assert check() == 1
    assert "3 files checked, 1 problems\nmissing or damaged rollouts: send" in capsys.readouterr().out


def test_each_file_that_differs_is_named_until_the_same_shard_is_sent_again(
    sender: Sender, files: list[Path], settings: Settings, http: httpx.Client
) -> None:
    whole = files[1].read_bytes()
    column = pq.read_metadata(files[1]).row_group(0).column(3)
    flipped = bytearray(whole)
    flipped[column.data_page_offset + column.total_compressed_size - 5] ^= 1
    for damage, fault in (
        (None, "missing"),
        (b"", "damaged, this is not a Parquet file"),
        (whole[:100], "damaged, this is not a Parquet file"),
        (bytes(flipped), "damaged, "),
    ):
        if damage is None:
            files[1].unlink()
        else:
            files[1].write_bytes(damage)
        (problem,) = problems_of(settings)
        assert problem.startswith(fault)
        assert f"{files[1].name} (run {sender.run}, attempt 1, step 1, shard 0)" in problem
        assert sender.put_shard(1, encode_rollouts(make_batch(4, seed=1))).status_code == 200
        assert problems_of(settings) == []
    files[1].write_bytes(files[0].read_bytes())
    assert problems_of(settings)[0].startswith("holds ")
    files[1].write_bytes(whole[:100])
    answer = http.get(f"/v1/runs/{sender.run}/steps/1/tokens")
    assert problem_of(answer) == (500, "tokens-damaged")


def test_size_that_differs_from_the_row_is_named(files: list[Path], settings: Settings) -> None:
    pq.write_table(pq.read_table(files[0]), files[0], compression="none")
    (problem,) = problems_of(settings)
    assert problem.startswith(f"has {files[0].stat().st_size:,} bytes, not ")


def test_an_orphan_is_named_and_one_in_its_grace_is_not(sender: Sender, files: list[Path], settings: Settings) -> None:
    old = Path(settings.store_url) / score_file_name(sender.run, 1, 1, "job_1", "sha256:" + "0" * 64)
    old.parent.mkdir()
    shutil.copy(files[0], old)
    shutil.copy(files[0], files[0].with_name(files[0].name.replace("00000-", "00001-")))
    then = time.time() - 2 * 86_400.0
    os.utime(old, (then, then))
    (problem,) = problems_of(settings)
    assert problem == f"no row names it: {old.relative_to(settings.store_url)}, {old.stat().st_size:,} bytes"
    assert old.exists()


def test_files_of_no_run_are_no_fault(
    http: httpx.Client, sender: Sender, files: list[Path], settings: Settings
) -> None:
    (Path(settings.store_url) / "notes.txt").write_text("of an operator")
    assert http.delete(f"/v1/runs/{sender.run}").status_code == 204
    files[0].unlink()
    with maintenance_context(settings) as context:
        assert check_store(context) == (0, [])
