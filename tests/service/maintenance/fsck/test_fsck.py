"""`foreshock fsck` finds every way in which files and catalogue can differ, and repairs what can be repaired."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.maintenance.fsck import Request, fsck
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import score_file_name
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import list_files

_DAY = 86_400.0


@pytest.fixture
def command(
    settings: Settings, decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """A call of `foreshock fsck --json` on the service's own data; returns the document, with its exit status."""
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)

    def run(**options: bool) -> dict[str, Any]:
        capsys.readouterr()
        status = fsck(Request(**options), as_json=True, decoders=decoders)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found | {"status": status}

    return run


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    """A run with three steps of one shard."""
    sender = start_run(http)
    for step in range(3):
        assert sender.put_shard(step, encode_rollouts(make_batch(4, seed=step))).status_code == 201
    return sender


@pytest.fixture
def files(sender: Sender, settings: Settings) -> list[Path]:
    """The token files of the steps."""
    return [Path(settings.store_url) / name for name in list_files(settings)]


def make_old(path: Path) -> None:
    """Make a file older than the grace."""
    then = time.time() - 2 * _DAY
    os.utime(path, (then, then))


def problems(document: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return each problem, and whether it was repaired."""
    return [(each["problem"], each["repaired"] is not None) for each in document["findings"]]


def test_a_sound_store(command: Callable[..., dict[str, Any]], files: list[Path]) -> None:
    document = command()
    assert (document["status"], document["sound"], document["findings"]) == (0, True, [])
    assert document["checked"] == {"rollouts": 3}


def test_a_missing_file_is_reported_and_sending_the_shard_again_heals_it(
    command: Callable[..., dict[str, Any]], sender: Sender, files: list[Path]
) -> None:
    files[1].unlink()
    document = command(quick=True)
    assert (document["status"], problems(document)) == (1, [("missing", False)])
    assert f"run {sender.run}, attempt 1, step 1, shard 0" in document["findings"][0]["owner"]
    assert command(repair=True)["status"] == 1
    assert sender.put_shard(1, encode_rollouts(make_batch(4, seed=1))).status_code == 200
    assert command()["status"] == 0


def test_a_flipped_bit_is_found_by_reading(command: Callable[..., dict[str, Any]], files: list[Path]) -> None:
    column = pq.read_metadata(files[2]).row_group(0).column(3)
    data = bytearray(files[2].read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 1
    files[2].write_bytes(data)
    assert command(quick=True)["status"] == 0
    assert problems(command()) == [("damaged", False)]


@pytest.mark.parametrize("left", [0, 1, 100])
def test_a_file_that_was_cut_is_told_as_one_of_the_store(
    command: Callable[..., dict[str, Any]], sender: Sender, files: list[Path], http: httpx.Client, left: int
) -> None:
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:left])
    (finding,) = command()["findings"]
    sizes = f"it has {left:,} bytes, and its row says {len(whole):,}"
    assert finding["problem"] == "damaged"
    assert finding["detail"] == f"it is cut off: {sizes}; this is not a Parquet file"
    assert finding["to_do"] == "send the same shard again, or copy the file from the backup: either restores it"
    answer = http.get(f"/v1/runs/{sender.run}/steps/1/tokens")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:foreshock:problem:tokens-damaged")
    assert "encode_rollouts" not in answer.text
    assert sender.put_shard(1, encode_rollouts(make_batch(4, seed=1))).status_code == 200
    assert command()["status"] == 0


def test_a_file_of_another_shard_is_found(command: Callable[..., dict[str, Any]], files: list[Path]) -> None:
    shutil.copy(files[0], files[1])
    (finding,) = command()["findings"]
    assert finding["problem"] == "damaged"
    assert "it holds" in finding["detail"]


def test_a_size_that_differs_from_the_row_is_repaired_if_the_contents_are_intact(
    command: Callable[..., dict[str, Any]], files: list[Path]
) -> None:
    # The same rollouts in a file of another size, as after an upgrade of the library that writes them.
    pq.write_table(pq.read_table(files[0]), files[0], compression="none")
    assert problems(command(quick=True)) == [("wrong size", False)]
    assert problems(command(repair=True)) == [("wrong size", True)]
    assert command()["status"] == 0


def test_an_orphan_is_removed_and_one_in_its_grace_stays(
    command: Callable[..., dict[str, Any]], sender: Sender, files: list[Path], settings: Settings
) -> None:
    old = Path(settings.store_url) / score_file_name(sender.run, 1, 1, "job_1", "sha256:" + "0" * 64)
    old.parent.mkdir()
    shutil.copy(files[0], old)
    young = files[0].with_name(files[0].name.replace("00000-", "00001-"))
    shutil.copy(files[0], young)
    make_old(old)
    assert problems(command()) == [("orphan", False)]
    document = command(repair=True)
    assert (document["status"], problems(document)) == (0, [("orphan", True)])
    assert not old.exists()
    assert young.exists()


def test_a_missing_file_is_restored_from_an_orphan_with_the_same_rollouts(
    command: Callable[..., dict[str, Any]], sender: Sender, files: list[Path]
) -> None:
    body = files[1].read_bytes()
    stem, _, _ = files[1].name.rpartition("-")
    orphan = files[1].with_name(f"{stem}-{'f' * 16}.parquet")
    files[1].rename(orphan)
    make_old(orphan)
    document = command(repair=True)
    assert (document["status"], sorted(problems(document))) == (0, [("missing", True), ("orphan", True)])
    assert files[1].read_bytes() == body
    assert not orphan.exists()
    assert sender.get("steps/1/tokens").status_code == 200


def test_files_that_went_with_their_run_are_no_fault_and_foreign_ones_are_left(
    command: Callable[..., dict[str, Any]], http: httpx.Client, sender: Sender, files: list[Path], settings: Settings
) -> None:
    note = Path(settings.store_url) / "notes.txt"
    note.write_text("of an operator")
    assert http.delete(f"/v1/runs/{sender.run}").status_code in (200, 204)
    files[0].unlink()
    document = command(repair=True)
    assert (document["status"], document["purged"], document["foreign"]) == (0, 3, 1)
    assert note.exists()


def test_the_table_says_what_to_do(
    settings: Settings, decoders: DecoderPool, files: list[Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    files[0].unlink()
    assert fsck(Request(), as_json=False, decoders=decoders) == 1
    printed = capsys.readouterr().out
    assert "files checked by names, sizes and contents: 3 of rollouts" in printed
    assert "missing            1         0" in printed
    assert "to do: send the same shard again" in printed
