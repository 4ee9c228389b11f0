"""`foreshock fsck` over a store in a real S3 server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.maintenance.fsck import Request, fsck
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import load_settings
from foreshock_service.platform.store.tokens import shard_file_name
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer
from tests.service.sending import make_batch, start_run
from tests.service.server import RunningServer


def test_missing_and_orphaned_objects_are_found_and_repaired(
    sqlite_template: Path, tmp_path: Path, decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "s3").mkdir()
    server = ObjectStoreServer(tmp_path / "s3")
    shutil.copy(sqlite_template, tmp_path / "foreshock.db")
    for name, value in {
        "DATABASE_URL": f"sqlite:///{tmp_path / 'foreshock.db'}",
        "STORE_URL": "s3://tokens/prefix",
        "STORE_ENDPOINT": server.url,
        "STORE_ACCESS_KEY_ID": ACCESS_KEY,
        "STORE_SECRET_ACCESS_KEY": SECRET_KEY,
        "STORE_TEMPORARY_FOLDER": str(tmp_path / "temporary"),
        "ORPHAN_GRACE_SECONDS": "0.001",
    }.items():
        monkeypatch.setenv(f"FORESHOCK_{name}", value)
    try:
        with (
            RunningServer(create_app(load_settings(), decoders)) as running,
            httpx.Client(base_url=running.url, timeout=60) as http,
        ):
            sender, store = start_run(http), running.app.state.context.store
            store.check_writable()
            for step in range(3):
                sender.put_shard(step, encode_rollouts(make_batch(4, seed=step))).raise_for_status()
            assert fsck(Request(), as_json=True, decoders=decoders) == 0
            lost, *_ = sorted(file.name for file in store.list_files())
            orphan = store.temporary_file()
            orphan.write_bytes(store.file(lost).read_bytes())
            store.remove(lost)
            # Of the same upload's bytes, so that the missing file is restored from it.
            digest = lost.rsplit("/", 1)[1].split("-")[1]
            store.publish(orphan, shard_file_name(sender.run, 1, 0, 0, digest))
            capsys.readouterr()
            assert fsck(Request(repair=True), as_json=True, decoders=decoders) == 0
            findings = json.loads(capsys.readouterr().out)["findings"]
            assert sorted(each["problem"] for each in findings) == ["missing", "orphan"]
            assert store.file(lost).exists()
            assert fsck(Request(), as_json=True, decoders=decoders) == 0
            assert sender.get("steps/0/tokens").status_code == 200
    finally:
        server.kill()
