"""Orphans: files that no catalogue row names are removed, and never one of a stored shard."""

import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock import clock
from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store import removal, tokens
from foreshock_service.platform.store.removal import give_up_files, remove_due_files, remove_orphans
from foreshock_service.runs import ingest
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import list_files

_DIGEST = "sha256:" + "0123456789abcdef" * 4
_HOUR = 3600.0


def put_file(store: tokens.LocalTokenStore, name: str, age_seconds: float) -> Path:
    """Publish a file that no row names, and make it older."""
    temporary = store.temporary_file()
    temporary.write_bytes(b"tokens")
    store.publish(temporary, name)
    path = store.path_of(name)
    then = time.time() - age_seconds
    os.utime(path, (then, then))
    return path


def make_older(store: tokens.LocalTokenStore, age_seconds: float) -> None:
    """Make every file of the store older."""
    then = time.time() - age_seconds
    for file in store.list_files():
        os.utime(store.path_of(file.name), (then, then))


@pytest.mark.parametrize("whose", [7, "job_abc"])
def test_names_are_read_back(whose: Any) -> None:
    make: Callable[..., str] = tokens.shard_file_name if whose == 7 else tokens.score_file_name
    found = tokens.parse_name(make("run_01abc", 2, 30, whose, _DIGEST))
    assert found is not None
    assert (found.run_id, found.attempt, found.step) == ("run_01abc", 2, 30)
    assert found.job_id == (None if whose == 7 else whose)
    assert tokens.parse_name("run_1/notes.txt") is None


def test_old_orphans_are_removed_and_all_else_stays(
    sender: Sender, context: ServiceContext, settings: Settings
) -> None:
    for step in range(3):
        assert sender.put_shard(step, encode_rollouts(make_batch(2, seed=step))).status_code == 201
    store = context.store
    assert isinstance(store, tokens.LocalTokenStore)
    make_older(store, 2 * _HOUR)
    kept = set(list_files(settings))
    assert len(kept) == 3
    old = [
        put_file(store, tokens.shard_file_name(sender.run, 1, 1, 0, _DIGEST), 2 * _HOUR),
        put_file(store, tokens.shard_file_name("run_unknown", 1, 1, 0, _DIGEST), 2 * _HOUR),
        put_file(store, tokens.score_file_name(sender.run, 1, 1, "job_1", _DIGEST), 2 * _HOUR),
    ]
    young = put_file(store, tokens.shard_file_name(sender.run, 1, 2, 0, _DIGEST), 0.5 * _HOUR)
    foreign = put_file(store, "notes/of-an-operator.txt", 100 * _HOUR)
    assert remove_orphans(store, context.database, _HOUR) == 3
    assert not any(path.exists() for path in old)
    assert young.exists()
    assert foreign.exists()
    assert kept < set(list_files(settings))
    # Folders that the removal left empty are gone too.
    assert not (store.root / "run_unknown").exists()


def test_an_upload_whose_file_was_taken_is_refused_and_stored_when_it_is_sent_again(
    http: httpx.Client, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch(2, seed=1))
    publish = tokens.LocalTokenStore.publish

    def sweep_before_commit(store: tokens.LocalTokenStore, temporary: Path, name: str) -> None:
        publish(store, temporary, name)
        assert remove_orphans(store, context.database, -1.0) == 1

    with monkeypatch.context() as patched:
        patched.setattr(tokens.LocalTokenStore, "publish", sweep_before_commit)
        refused = sender.put_shard(0, body)
    assert problem_of(refused) == (503, "storage-unavailable")
    assert sender.put_shard(0, body).status_code == 201
    assert sender.get("steps/0/tokens").status_code == 200


def test_a_sweep_of_another_process_waits_for_a_commit_in_progress(
    http: httpx.Client, context: ServiceContext, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, removed = start_run(http), list[int]()
    commit_shard = ingest.commit_shard

    def sweep() -> None:
        database = Database(settings.database_url)
        removed.append(remove_orphans(context.store, database, -1.0))
        database.close()

    thread = threading.Thread(target=sweep)

    def sweep_meanwhile(*arguments: Any) -> Any:
        stored = commit_shard(*arguments)
        thread.start()
        time.sleep(0.3)
        return stored

    monkeypatch.setattr(ingest, "commit_shard", sweep_meanwhile)
    assert sender.put_shard(0, encode_rollouts(make_batch(2, seed=1))).status_code == 201
    thread.join()
    assert removed == [0]
    assert sender.get("steps/0/tokens").status_code == 200


def test_files_that_were_given_up_wait_for_their_removal(context: ServiceContext) -> None:
    store = context.store
    assert isinstance(store, tokens.LocalTokenStore)
    name = tokens.shard_file_name("run_1", 1, 1, 0, _DIGEST)
    path = put_file(store, name, 48 * _HOUR)
    context.database.write(lambda session: give_up_files(session, [(name, 6)], "retention", 3600))
    assert remove_orphans(store, context.database, _HOUR) == 0
    assert path.exists()


def test_file_that_cannot_be_removed_is_tried_later_alone(
    context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, database = context.store, context.database
    assert isinstance(store, tokens.LocalTokenStore)
    names = [tokens.shard_file_name("run_1", 1, 1, shard, _DIGEST) for shard in range(5)]
    paths = [put_file(store, name, 48 * _HOUR) for name in names]
    database.write(lambda session: give_up_files(session, [(name, 6) for name in names[:3]], "retention", -1))
    remove = tokens.LocalTokenStore.remove

    def refuse(store: tokens.LocalTokenStore, name: str) -> None:
        if name in (names[0], min(names[3:])):
            raise PermissionError(errno.EACCES, "refused")
        remove(store, name)

    with monkeypatch.context() as patched:
        patched.setattr(tokens.LocalTokenStore, "remove", refuse)
        for sweep in (remove_due_files, partial(remove_orphans, grace_seconds=_HOUR)):
            with pytest.raises(PermissionError):
                sweep(database=database, store=store)
    assert [path.exists() for path in paths[:3]] == [True, False, False]
    assert [path.exists() for path in paths[3:]].count(True) == 1
    assert remove_due_files(database, store) == 0
    # Both wait, the one for an hour and the orphan for a week, with the row of the orphan that is gone.
    monkeypatch.setattr(removal, "now_us", lambda: clock.now_us() + 8 * 86_400_000_000)
    assert remove_due_files(database, store) == 3
    assert not any(path.exists() for path in paths)
