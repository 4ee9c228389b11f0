"""Failures of storage: nothing is stored, the answer says when to try again, and the same bytes are stored then."""

import base64
import errno
import hashlib
import io
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform import uploads
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.problem import database_problem, storage_problem
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import LocalTokenStore
from foreshock_service.runs import shard_decoding
from tests.service.sending import PARQUET, Sender, make_batch, problem_of, start_run
from tests.service.stored import count_rows, list_files

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def assert_sent_again(sender: Sender, settings: Settings, body: bytes) -> None:
    assert sender.put_shard(7, body).status_code == 201
    assert count_rows(settings)["shards"] == 1
    assert len(list_files(settings)) == 1


@on_sqlite
@pytest.mark.parametrize(("name", "rollouts"), [("temporary_file", 4_000), ("publish", 3)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_store_that_fails_keeps_nothing_and_says_when_to_come_again(
    sender: Sender, settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str, rollouts: int, number: int
) -> None:
    body = encode_rollouts(make_batch(rollouts))
    with monkeypatch.context() as broken:
        broken.setattr(LocalTokenStore, name, failing(number))
        answer = sender.put_shard(7, body)
    status, kind = (503, "storage-unavailable") if number == errno.EROFS else (507, "storage-full")
    assert problem_of(answer) == (status, kind)
    assert answer.headers["Retry-After"] == "30"
    assert "shards" not in count_rows(settings)
    assert not list_files(settings)
    assert_sent_again(sender, settings, body)


@on_sqlite
def test_decoder_without_room_is_a_full_store(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another layout than the store's: a body that has it is stored as it came, and nothing is written.
    rewritten = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(encode_rollouts(make_batch()))), rewritten, compression="snappy")
    sender, body = start_run(http), rewritten.getvalue()
    new = LocalTokenStore.temporary_file
    given: list[Path] = []

    def second_is_full(store: LocalTokenStore) -> Path:
        # That of the tokens, after that of the body: every write to /dev/full fails with ENOSPC.
        given.append(new(store) if len(given) != 1 else Path("/dev/full"))
        return given[-1]

    with monkeypatch.context() as broken:
        broken.setattr(LocalTokenStore, "temporary_file", second_is_full)
        broken.setattr(Path, "unlink", lambda path, **_: None if str(path) == "/dev/full" else os.unlink(path))
        answer = sender.put_shard(7, body)
    assert problem_of(answer) == (507, "storage-full")
    assert_sent_again(sender, settings, body)


@on_sqlite
@pytest.mark.parametrize("missing", [1, 5_000])
def test_upload_whose_last_block_does_not_fit_is_not_invalid(
    http: httpx.Client, settings: Settings, missing: int
) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch(10_000))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a disk that becomes full: the kernel stores a part of the last block, without an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(body) - missing, unlimited[1]))
    try:
        answer = sender.put_shard(7, body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert problem_of(answer) == (507, "storage-full")
    assert not list((settings.store_folder / "temporary").iterdir())
    assert_sent_again(sender, settings, body)


@on_sqlite
def test_refusal_of_a_changed_file_is_not_final(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch())
    decode = shard_decoding.decode_shard

    def damaged(run: Any, function: Any, path: Path, *arguments: Any) -> Any:
        os.truncate(path, len(body) - 1)
        return run(decode, path, *arguments)

    run = DecoderPool.run
    with monkeypatch.context() as broken:
        broken.setattr(DecoderPool, "run", lambda pool, *arguments: damaged(partial(run, pool), *arguments))
        answer = sender.put_shard(7, body)
    assert problem_of(answer) == (503, "storage-unavailable")
    assert_sent_again(sender, settings, body)


@on_sqlite
def test_body_of_another_digest_than_was_sent_is_sent_again(http: httpx.Client, settings: Settings) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch())
    other = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    path = f"/v1/runs/{sender.run}/steps/7/rollouts/0"
    http.headers["Content-Type"] = PARQUET
    answer = http.put(path, content=body, headers={"Content-Digest": f"sha-256=:{other}:"})
    assert problem_of(answer) == (400, "upload-incomplete")
    assert not list_files(settings)
    own = base64.b64encode(hashlib.sha256(body).digest()).decode()
    assert http.put(path, content=body, headers={"Content-Digest": f"sha-256=:{own}:"}).status_code == 201


@on_sqlite
def test_a_full_database_is_said_and_recovers(app: FastAPI, http: httpx.Client, settings: Settings) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch(200))
    engine = app.state.context.database._write_engine

    def no_more_pages(connection: Any) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    def more_pages(connection: Any) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")

    event.listen(engine, "begin", no_more_pages)
    answers = [sender.put_shard(step, body) for step in range(4)]
    event.remove(engine, "begin", no_more_pages)
    assert {(answer.status_code, answer.json()["type"]) for answer in answers} == {
        (507, "urn:foreshock:problem:storage-full")
    }
    assert "shards" not in count_rows(settings)
    assert not list_files(settings)
    event.listen(engine, "begin", more_pages)
    assert_sent_again(sender, settings, body)


@on_sqlite
def test_folder_that_becomes_read_only_is_read_and_takes_writes_later(
    app: FastAPI, http: httpx.Client, settings: Settings
) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch(200))
    engine = app.state.context.database._write_engine

    def read_only(_: Any) -> None:
        raise OperationalError("BEGIN IMMEDIATE", {}, sqlite3.OperationalError("attempt to write a readonly database"))

    event.listen(engine, "begin", read_only)
    refused = [sender.put_shard(1, body), sender.put_scalars(1, {"reward": 1.0}), http.delete(f"/v1/runs/{sender.run}")]
    assert [(each.status_code, each.headers["Retry-After"]) for each in refused] == [(503, "30")] * 3
    assert http.get("/readyz").status_code == 503
    for path in ("/livez", "/metrics", f"/v1/runs/{sender.run}/lr-advice", f"/v1/runs/{sender.run}/measurements"):
        assert http.get(path).status_code == 200
    event.remove(engine, "begin", read_only)
    assert_sent_again(sender, settings, body)


def test_other_errors_are_no_failures_of_storage() -> None:
    assert storage_problem(FileNotFoundError(errno.ENOENT, "missing")) is None
    assert database_problem(OperationalError("", {}, Exception("server closed the connection"))).status == 503
    busy = database_problem(PoolTimeout("QueuePool limit of size 3 overflow 0 reached"))
    assert (busy.status, "raise FORESHOCK_DATABASE_CONNECTIONS" in busy.detail) == (503, True)


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
    uploads.make_reserve(settings)
    assert reserve.stat().st_size == 16 * MEBIBYTE
    uploads.free_reserve(settings)
    assert reserve.exists()
    leave(monkeypatch, MEBIBYTE - 1)
    uploads.free_reserve(settings)
    assert not reserve.exists()
    uploads.make_reserve(settings)
    assert not reserve.exists()
