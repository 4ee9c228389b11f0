"""Backup as docs/operations.md has it: the database first, then the files, while uploads and removals go on."""

import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from foreshock_service.app import create_app
from foreshock_service.maintenance.retention import purge
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.opening import existing_database
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removal import remove_due_files
from foreshock_service.runs.shard_decoding import is_intact
from tests.service.postgres import PostgresCluster, find_programs
from tests.service.sending import Sender, make_batch, start_run


@contextmanager
def uploading(sender: Sender, context: ServiceContext) -> Iterator[threading.Event]:
    """Upload steps, and purge and remove all but the newest four, in two threads until the block ends."""
    kept = {"retention_last_steps": 4, "retention_alert_steps": 0}
    purging = replace(context, settings=context.settings.model_copy(update=kept))
    stopped, some = threading.Event(), threading.Event()
    stored: list[int] = []

    def upload() -> None:
        step = 0
        while not stopped.is_set():
            step += 1
            sender.put_shard(step, make_batch(seed=step)).raise_for_status()
            stored.append(step)
            if step == 12:
                some.set()

    def remove() -> None:
        while not stopped.wait(0.01):
            list(purge(purging))
            remove_due_files(context.database, context.store)

    threads = [threading.Thread(target=work) for work in (upload, remove)]
    for thread in threads:
        thread.start()
    try:
        assert some.wait(120)
        yield some
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert len(stored) >= 12


def back_up_database(url: str, target: Path, postgres: PostgresCluster | None) -> None:
    """Take the snapshot with the commands of the documentation."""
    if postgres is None:
        path = urlsplit(url).path.removeprefix("/")
        with closing(sqlite3.connect(f"/{path.lstrip('/')}")) as connection:
            connection.execute("VACUUM INTO ?", (str(target),))
        return
    subprocess.run([find_programs() / "pg_dump", "--format=custom", f"--file={target}", url], check=True)


def restore_database(source: Path, folder: Path, postgres: PostgresCluster | None) -> str:
    """Restore the snapshot into a new database; return its URL."""
    if postgres is None:
        shutil.copy(source, folder / "restored.db")
        return f"sqlite:///{folder}/restored.db"
    url = postgres.new_database()
    subprocess.run([find_programs() / "pg_restore", "--no-owner", f"--dbname={url}", source], check=True)
    return url


def test_restored_service_has_a_file_for_each_row(
    http: httpx.Client,
    context: ServiceContext,
    settings: Settings,
    decoders: DecoderPool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    postgres = None if settings.database_url.startswith("sqlite") else request.getfixturevalue("postgres")
    sender = start_run(http)
    with uploading(sender, context):
        back_up_database(settings.database_url, tmp_path / "snapshot", postgres)
        # Files that are published, renamed or removed while they are copied belong to rows after the snapshot, or wait
        # for their removal.
        copied = subprocess.run(["cp", "-a", settings.store_url, str(tmp_path / "copy")], capture_output=True)
    assert copied.returncode in (0, 1)

    url = restore_database(tmp_path / "snapshot", tmp_path, postgres)
    restored = settings.model_copy(update={"database_url": url, "store_url": str(tmp_path / "copy")})
    with existing_database(url) as database, database.read() as session:
        shards = session.query(Shard).all()
    rows = {shard.step: shard for shard in shards if shard.tokens_purged_at_us is None}
    purged = {shard.step for shard in shards if shard.tokens_purged_at_us is not None}
    assert len(shards) >= 12
    assert purged
    app = create_app(restored, decoders)
    with TestClient(app) as client:
        store = app.state.context.store
        assert [step for step, shard in rows.items() if not is_intact(store.file(shard.file))] == []
        for step in rows:
            answer = client.get(f"/v1/runs/{sender.run}/steps/{step}/tokens", headers={"Host": "localhost"})
            assert answer.status_code == 200, answer.text
        assert client.get(f"/v1/runs/{sender.run}/measurements", headers={"Host": "localhost"}).status_code == 200
