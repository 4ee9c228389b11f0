"""A full disk refuses uploads while there is room to delete, and is opened once its reserve is given up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from foreshock_service.platform import disk_room
from foreshock_service.platform.settings import Settings
from tests.service.sending import make_batch, start_run

MEBIBYTE = 1 << 20


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 40, (1 << 40) - free, free))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_upload_is_refused_while_deletions_need_the_room(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = start_run(http, "run")
    sender.put_shard(1, make_batch(seed=1)).raise_for_status()
    leave(monkeypatch, 16 * MEBIBYTE - 1)
    refused = sender.put_shard(2, make_batch(seed=2))
    assert (refused.status_code, refused.headers["retry-after"]) == (507, "30")
    assert refused.json()["type"] == "urn:foreshock:problem:storage-full"
    assert http.delete(f"/v1/runs/{sender.run}").status_code == 204
    leave(monkeypatch, 16 * MEBIBYTE)
    assert start_run(http, "other").put_shard(2, make_batch(seed=2)).status_code == 201


def test_reserve_is_given_up_when_its_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/f.db", store_url=str(tmp_path / "tokens"))
    reserve = tmp_path / "f.db.reserve"
    leave(monkeypatch, 65 * MEBIBYTE)
    disk_room.make_reserve(settings)
    assert reserve.stat().st_size == 16 * MEBIBYTE
    disk_room.free_reserve(settings)
    assert reserve.exists()
    leave(monkeypatch, MEBIBYTE - 1)
    disk_room.free_reserve(settings)
    assert not reserve.exists()
    disk_room.make_reserve(settings)
    assert not reserve.exists()
