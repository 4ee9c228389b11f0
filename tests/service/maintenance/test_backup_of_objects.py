"""Backup of a store in S3 as docs/operations.md has it: the database first, then a copy of the prefix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from pyarrow import fs

from foreshock_service.app import create_app
from foreshock_service.platform.database.opening import existing_database
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.shard_decoding import is_intact
from tests.service.maintenance.test_backup import back_up_database, uploading
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer
from tests.service.sending import start_run
from tests.service.server import RunningServer

PREFIX, COPY = "tokens/prefix", "tokens/restored"
HOST = {"Host": "localhost"}


@pytest.fixture
def object_store(tmp_path: Path) -> Iterator[ObjectStoreServer]:
    (tmp_path / "s3").mkdir()
    server = ObjectStoreServer(tmp_path / "s3")
    yield server
    server.kill()


@pytest.mark.parametrize("restored_to", ["a folder", "another prefix"])
def test_copied_prefix_has_a_file_for_each_row(
    restored_to: str, object_store: ObjectStoreServer, sqlite_template: Path, tmp_path: Path, decoders: DecoderPool
) -> None:
    shutil.copy(sqlite_template, tmp_path / "foreshock.db")
    settings = Settings.model_validate(
        {
            "database_url": f"sqlite:///{tmp_path / 'foreshock.db'}",
            "store_url": f"s3://{PREFIX}",
            "store_endpoint": object_store.url,
            "store_access_key_id": ACCESS_KEY,
            "store_secret_access_key": SECRET_KEY,
            "store_temporary_folder": str(tmp_path / "temporary"),
        }
    )
    remote = fs.S3FileSystem(
        access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_override=object_store.url, region="us-east-1"
    )
    with (
        RunningServer(create_app(settings, decoders)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        sender, context = start_run(http), server.app.state.context
        with uploading(sender, context):
            back_up_database(settings.database_url, tmp_path / "snapshot", None)
            fs.copy_files(PREFIX, str(tmp_path / "copy"), source_filesystem=remote)
    if restored_to == "a folder":
        restored = {"store_url": str(tmp_path / "copy")}
    else:
        fs.copy_files(str(tmp_path / "copy"), COPY, destination_filesystem=remote)
        restored = {"store_url": f"s3://{COPY}"}
    url = f"sqlite:///{tmp_path / 'snapshot'}"
    with existing_database(url) as database, database.read() as session:
        shards = session.query(Shard).all()
    rows = {shard.step: shard.file for shard in shards if shard.tokens_purged_at_us is None}
    assert rows.keys() < {shard.step for shard in shards}, "some steps were purged"
    app = create_app(settings.model_copy(update={"database_url": url, **restored}), decoders)
    with TestClient(app) as client:
        store = app.state.context.store
        assert [step for step, file in rows.items() if not is_intact(store.file(file))] == []
        for step in rows:
            assert client.get(f"/v1/runs/{sender.run}/steps/{step}/tokens", headers=HOST).status_code == 200
