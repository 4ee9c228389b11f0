"""Tests of the spool: complete entries or none, in order, the same bytes, one owner at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from foreshock.client import spool as spool_module
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.spool import Item, Spool, SpoolFullError
from foreshock.errors import SpoolError
from tests.paths import REPOSITORY

REGISTRATION = Registration(
    run={"project": "default", "key": "räksmörgås"}, attempt={"key": "a", "resume_step": 3, "fingerprint": {"x": [1]}}
)


def delivery(body: bytes, kind: str = "scalars") -> Delivery:
    return Delivery(
        kind,  # type: ignore[arg-type]
        REGISTRATION,
        method="PUT",
        path="/v1/runs/{run}/steps/1/scalars",
        query={"attempt": "{attempt}"},
        body=body,
    )


def spool_in(
    folder: Path, max_bytes: int = 1000, project: str = "default", key: str | None = None, url: str = "http://one:1"
) -> Spool:
    return Spool(folder, url=url, project=project, api_key=key, max_bytes=max_bytes, max_rejected_bytes=100)


def written(spool: Spool, number: int, what: Delivery) -> Path:
    """Write a delivery and return its file."""
    return item_of(spool, number, what).path or Path()


def item_of(spool: Spool, number: int, what: Delivery) -> Item:
    item = Item(len(what.body), what.registration.run_identity, number)
    spool.write(item, what)
    return item


def loaded(spool: Spool, item: Item) -> Delivery:
    assert item.path is not None
    return spool.load(item.path)


def bodies(spool: Spool) -> list[bytes]:
    return [bytes(loaded(spool, item).body) for item in spool.adopt()]


def test_unused_spool_creates_nothing(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    assert spool.adopt() == []
    spool.close()
    assert not (tmp_path / "spool").exists()


def test_written_entries_are_read_back_by_the_next_process(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    sent = [delivery(b"\x00\xff" * n) for n in (3, 1, 2)]
    for number, each in enumerate(sent):
        written(first, number, each)
    first.close()
    second = spool_in(tmp_path)
    entries = second.adopt()
    assert [loaded(second, entry) for entry in entries] == sent
    assert second.size == 12
    for entry in entries:
        second.remove(entry)
    assert second.size == 0
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_sync_is_one_call_an_item_and_one_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = spool_in(tmp_path)
    entries = [item_of(spool, number, delivery(b"x")) for number in range(5)]
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    spool.sync(entries)
    assert len(synced) == 6


def test_file_is_a_line_of_metadata_and_the_bytes(tmp_path: Path) -> None:
    path = written(spool_in(tmp_path), 7, delivery(b"abc"))
    assert path.name == "000000000007.item"
    assert path.read_bytes().endswith(b"\nabc")


def test_items_of_another_service_are_left_to_its_clients(tmp_path: Path) -> None:
    for url in ("http://one:1", "http://two:2"):
        ended = spool_in(tmp_path, url=url)
        written(ended, 1, delivery(url.encode()))
        ended.close()
    assert bodies(spool_in(tmp_path, url="http://two:2/")) == [b"http://two:2"]
    other_key = spool_in(tmp_path, key="another", url="http://three:3")
    assert other_key.adopt(other_keys=True) == []
    assert bodies(spool_in(tmp_path, url="http://one:1")) == [b"http://one:1"]


def test_locked_folder_is_not_adopted(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    written(first, 1, delivery(b"x"))
    assert bodies(spool_in(tmp_path)) == []
    first.close()
    assert bodies(spool_in(tmp_path)) == [b"x"]


def test_entries_of_killed_processes_are_adopted_oldest_first(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from tests.foreshock.client.test_spool import delivery, spool_in, written
        spool = spool_in(Path(sys.argv[1]))
        for sequence in range(1, 12):
            written(spool, sequence, delivery(f"{sys.argv[2]}{sequence}".encode()))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for name in "ab":
        killed = subprocess.run([sys.executable, "-c", program, tmp_path, name], cwd=REPOSITORY)
        assert killed.returncode == -9
    assert bodies(spool_in(tmp_path)) == [f"{name}{n}".encode() for name in "ab" for n in range(1, 12)]


def test_incomplete_entry_is_ignored(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    whole = written(spool, 1, delivery(b"whole"))
    (whole.parent / "000000000003.item.partial").write_bytes(b"half")
    spool.close()
    again = spool_in(tmp_path)
    assert bodies(again) == [b"whole"]
    assert {path.suffix for path in whole.parent.iterdir()} == {".item", ""}


@pytest.mark.parametrize("damage", ["body", "metadata", "empty"])
def test_damaged_entry_raises_and_can_be_set_aside(tmp_path: Path, damage: str) -> None:
    spool = spool_in(tmp_path)
    entry = written(spool, 1, delivery(b"abc"))
    spool.close()
    if damage == "body":
        entry.write_bytes(entry.read_bytes()[:-1] + b"d")
    elif damage == "metadata":
        entry.write_bytes(b"{" + entry.read_bytes())
    else:
        entry.write_bytes(b"")
    again = spool_in(tmp_path)
    (found,) = again.adopt()
    with pytest.raises((ValueError, SpoolError)):
        loaded(again, found)
    again.set_aside(found)
    again.close()
    assert not entry.exists()
    (kept,) = tmp_path.glob("*.rejected")
    assert kept.name.endswith("-000000000001.rejected")
    assert spool_in(tmp_path).adopt() == []


def test_size_limit_applies_except_to_needed_deliveries(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, max_bytes=10)
    item = item_of(spool, 1, delivery(b"x" * 8))
    with pytest.raises(SpoolFullError):
        written(spool, 2, delivery(b"y" * 3))
    written(spool, 3, delivery(b"y" * 3, "state"))
    spool.remove(item)
    written(spool, 4, delivery(b"y" * 3))


def test_rejected_items_are_kept_as_they_are_within_the_limit(tmp_path: Path) -> None:
    spool = Spool(
        tmp_path, url="http://one:1", project="default", api_key=None, max_bytes=1000, max_rejected_bytes=1500
    )
    item = item_of(spool, 1, delivery(b"x" * 60))
    assert item.path is not None
    whole = item.path.read_bytes()
    path = spool.set_aside(item)
    assert path is not None
    assert path.read_bytes() == whole
    in_memory = Item(1, ("default", "a"), 2, delivery=delivery(b"z"))
    kept = spool.set_aside(in_memory)
    assert kept is not None
    assert kept.read_bytes().endswith(b"\nz")
    beyond = item_of(spool, 3, delivery(b"y" * 990))
    assert spool.set_aside(beyond) is None
    assert spool.size == 0
    spool.close()
    assert set(tmp_path.iterdir()) == {path, kept}
    assert spool_in(tmp_path).adopt() == []


def test_file_in_place_of_the_folder_is_a_spool_error(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("not a folder")
    with pytest.raises(SpoolError, match="cannot be used"):
        written(spool_in(tmp_path / "spool"), 1, delivery(b"x"))


def test_only_the_same_project_and_key_adopt_at_once(tmp_path: Path) -> None:
    for project, key in (("a", "1"), ("a", "2"), ("b", "1")):
        spool = spool_in(tmp_path, project=project, key=key)
        written(spool, 1, delivery(f"{project}{key}".encode()))
        spool.close()
    spool = spool_in(tmp_path, project="a", key="1")
    assert bodies(spool) == [b"a1"]
    (other,) = spool.adopt(other_keys=True)
    assert loaded(spool, other).body == b"a2"
    assert spool.adopt(other_keys=True) == []
    assert bodies(spool_in(tmp_path, project="b", key="1")) == [b"b1"]


def test_files_are_readable_by_their_user_only(tmp_path: Path) -> None:
    entry = written(spool_in(tmp_path / "spool"), 1, delivery(b"x"))
    for path in (tmp_path / "spool", entry.parent, entry):
        assert path.stat().st_mode & 0o077 == 0
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    written(spool_in(opened), 1, delivery(b"x"))
    assert opened.stat().st_mode & 0o777 == 0o700


PLANTED = [
    {"method": "PUT", "path": "http://thief.example/v1/runs/{run}/steps/1/scalars"},
    {"method": "DELETE", "path": "/v1/runs/{run}"},
    {"method": "PUT", "path": "/v1/runs/other/steps/1/scalars"},
    {"method": "PUT", "path": "/v1/runs/{run.__class__}/steps/1/scalars"},
    {"kind": "state", "method": "DELETE", "path": "/v1/runs/{run}"},
    {"kind": "register", "method": "POST", "path": "/v1/runs"},
    {"query": {"attempt": "{attempt}", "x": "1"}},
    {"query": {"attempt": "1"}},
    {"content_type": "text/html"},
    {"run": {}},
    {"kind": "new"},
]


@pytest.mark.parametrize("change", PLANTED, ids=str)
def test_request_that_no_client_makes_is_set_aside(tmp_path: Path, change: dict[str, object]) -> None:
    spool = spool_in(tmp_path)
    entry = written(spool, 1, delivery(b"x"))
    spool.close()
    head, _, body = entry.read_bytes().partition(b"\n")
    entry.write_bytes(json.dumps(json.loads(head) | change).encode() + b"\n" + body)
    (found,) = spool_in(tmp_path).adopt()
    with pytest.raises(ValueError):
        loaded(spool, found)


def test_link_in_the_spool_is_not_followed(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    entry = written(spool, 1, delivery(b"secret"))
    spool.close()
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    (found,) = spool_in(tmp_path / "spool").adopt()
    with pytest.raises(SpoolError):
        loaded(spool, found)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / entry.parent.name).symlink_to(entry.parent)
    assert spool_in(linked).adopt() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folders_of_other_users_are_neither_read_nor_used(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    folder = written(spool, 1, delivery(b"planted")).parent
    spool.close()
    os.chown(folder, 12345, 12345)
    assert spool_in(tmp_path).adopt() == []
    os.chown(folder, 0, 0)
    folder.chmod(0o777)
    assert spool_in(tmp_path).adopt() == []
    folder.chmod(0o700)
    assert len(spool_in(tmp_path).adopt()) == 1
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from tests.foreshock.client.test_spool import delivery, spool_in, written
        os.setuid(23456)
        for use in (lambda spool: spool.adopt(), lambda spool: written(spool, 1, delivery(b"x"))):
            try:
                use(spool_in(Path(sys.argv[1])))
            except OSError as error:
                print(error)
    """)
    os.chown(tmp_path, 12345, 12345)
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        if parent != Path(tempfile.gettempdir()):
            parent.chmod(0o711)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.stdout.count("belongs to another user (uid 12345)") == 2, done.stderr


def test_disk_that_is_full_from_the_start_costs_no_descriptor_and_no_file(tmp_path: Path) -> None:
    """The disk takes names, but no content: the lock of the process's own folder is made, and cannot be written."""
    left = spool_in(tmp_path)
    written(left, 1, delivery(b"left"))
    left.close()
    program = textwrap.dedent("""
        import os, resource, sys
        from pathlib import Path
        from foreshock.errors import SpoolError
        from tests.foreshock.client.test_spool import bodies, delivery, spool_in, written
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        spool = spool_in(Path(sys.argv[1]))
        print(bodies(spool))
        before = os.listdir("/proc/self/fd")
        for number in range(20):
            try:
                written(spool, number, delivery(b"x"))
            except SpoolError as error:
                assert "cannot be used" in str(error)
        print(len(os.listdir("/proc/self/fd")) - len(before))
        spool.close()
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "0"], done.stderr
    assert len(list(tmp_path.iterdir())) == 1
    # What could not be adopted on a full disk is adopted once there is room.
    assert bodies(spool_in(tmp_path)) == [b"left"]


def test_many_items_are_synced_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(spool_module, "sync", calls.append)

    def sync_file_system(folder: Path) -> bool:
        calls.append(folder)
        return True

    monkeypatch.setattr(spool_module, "sync_file_system", sync_file_system)
    spool = spool_in(tmp_path / "spool", max_bytes=1 << 20)
    items = [item_of(spool, number, delivery(b"x")) for number in range(3_000)]
    calls.clear()
    spool.sync(items)
    assert calls == [tmp_path / "spool"]


def test_item_that_is_delivered_while_it_is_synced_is_no_failure(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    items = [item_of(spool, number, delivery(b"x")) for number in range(3)]
    spool.remove(items[1])
    spool.sync(items)


def test_folder_that_another_client_removes_meanwhile_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        ended = spool_in(tmp_path / "spool")
        written(ended, number, delivery(b"x"))
        ended.close()
    first, *_ = sorted((tmp_path / "spool").iterdir())
    lock_of = spool_module._lock_of

    def removed(folder: Path) -> int | None:
        lock = lock_of(folder)
        if folder == first:
            shutil.rmtree(folder)
        return lock

    monkeypatch.setattr(spool_module, "_lock_of", removed)
    spool = spool_in(tmp_path / "spool")
    assert len(spool.adopt()) == 2
    assert first not in spool._locks


def test_folder_without_locks_is_used_and_adopted_once_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("foreshock.client.spool.fcntl.flock", refuse)
    written(spool_in(tmp_path), 1, delivery(b"first"))
    (folder,) = [each for each in tmp_path.iterdir() if not each.name.startswith(".")]
    # This process runs.
    assert bodies(spool_in(tmp_path)) == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(120)
    host = (folder / "lock").read_text().split()[0]
    # What runs on another host cannot be known.
    (folder / "lock").write_text(f"not-{host} {ended.pid}")
    assert bodies(spool_in(tmp_path)) == []
    (folder / "lock").write_text(f"{host} {ended.pid}")
    adopting = spool_in(tmp_path)
    assert bodies(adopting) == [b"first"]
    assert bodies(spool_in(tmp_path)) == []
