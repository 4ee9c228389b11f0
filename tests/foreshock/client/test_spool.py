"""Tests of the spool: complete entries or none, in order, the same bytes, one owner at a time."""

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
from foreshock.client.reporting import Counters, LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import Item, Spool
from foreshock.errors import SpoolError
from tests.paths import REPOSITORY

REGISTRATION = Registration(
    run={"project": "default", "key": "räksmörgås"}, attempt={"key": "a", "resume_step": 3, "fingerprint": {"x": [1]}}
)


def delivery(body: bytes, kind: str = "scalars") -> Delivery:
    return Delivery(kind, REGISTRATION, {"step": 1}, body)


def spool_in(
    folder: Path, project: str = "default", key: str | None = None, url: str = "http://one:1", **limits: int
) -> Spool:
    """Return a spool that keeps nothing in memory."""
    settings = ClientSettings(url, key, folder, **{"max_memory_bytes": 0, **limits})  # type: ignore[arg-type]
    return Spool(settings, project, Counters(), LogOnce("test"))


def written(spool: Spool, what: Delivery) -> Path:
    """Write a delivery and return its file."""
    spool.append(what)
    path = items(spool)[-1].path
    assert path is not None
    return path


def items(spool: Spool) -> list[Item]:
    return list(spool._items)


def bodies(spool: Spool, *, other_keys: bool = False) -> list[bytes]:
    """Take over what earlier processes left; return the bytes of all items in order."""
    spool.adopt(other_keys=other_keys)
    return [bytes(spool.load(item).body) for item in items(spool)]


def left_in(spool: Spool) -> Item:
    """Take over the one item that an earlier process left."""
    spool.adopt()
    (item,) = items(spool)
    return item


def test_unused_spool_creates_nothing(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    assert bodies(spool) == []
    spool.close()
    assert not (tmp_path / "spool").exists()


def test_written_items_are_read_back_by_the_next_process(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    sent = [delivery(b"\x00\xff" * n) for n in (3, 1, 2)]
    paths = [written(first, each) for each in sent]
    assert [path.name for path in paths] == [f"00000000000{number}.item" for number in (1, 2, 3)]
    assert paths[0].read_bytes().endswith(b"\n" + b"\x00\xff" * 3)
    first.close()
    second = spool_in(tmp_path)
    second.adopt()
    assert [second.load(item) for item in items(second)] == sent
    assert second.size == 12
    for item in items(second):
        second.remove(item)
    assert (second.size, len(second)) == (0, 0)
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_what_waits_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = spool_in(tmp_path)
    for _ in range(5):
        written(spool, delivery(b"x"))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    spool.sync()
    spool.sync()
    assert len(synced) == 6


def test_items_of_another_service_are_left_to_its_clients(tmp_path: Path) -> None:
    for url in ("http://one:1", "http://two:2"):
        ended = spool_in(tmp_path, url=url)
        written(ended, delivery(url.encode()))
        ended.close()
    assert bodies(spool_in(tmp_path, url="http://two:2/")) == [b"http://two:2"]
    assert bodies(spool_in(tmp_path, key="another", url="http://three:3"), other_keys=True) == []
    assert bodies(spool_in(tmp_path, url="http://one:1")) == [b"http://one:1"]


def test_locked_folder_is_not_adopted(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    written(first, delivery(b"x"))
    assert bodies(spool_in(tmp_path)) == []
    first.close()
    assert bodies(spool_in(tmp_path)) == [b"x"]


def test_items_of_killed_processes_are_adopted_oldest_first(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from tests.foreshock.client.test_spool import delivery, spool_in, written
        spool = spool_in(Path(sys.argv[1]))
        for sequence in range(1, 12):
            written(spool, delivery(f"{sys.argv[2]}{sequence}".encode()))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for name in "ab":
        killed = subprocess.run([sys.executable, "-c", program, tmp_path, name], cwd=REPOSITORY)
        assert killed.returncode == -9
    assert bodies(spool_in(tmp_path)) == [f"{name}{n}".encode() for name in "ab" for n in range(1, 12)]


def test_incomplete_item_is_ignored(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    whole = written(spool, delivery(b"whole"))
    (whole.parent / "000000000003.item.partial").write_bytes(b"half")
    spool.close()
    again = spool_in(tmp_path)
    assert bodies(again) == [b"whole"]
    assert {path.suffix for path in whole.parent.iterdir()} == {".item", ""}


@pytest.mark.parametrize("damage", ["body", "metadata", "empty"])
def test_damaged_item_raises_and_can_be_set_aside(tmp_path: Path, damage: str) -> None:
    spool = spool_in(tmp_path)
    path = written(spool, delivery(b"abc"))
    spool.close()
    data = path.read_bytes()
    path.write_bytes({"body": data[:-1] + b"d", "metadata": b"{" + data, "empty": b""}[damage])
    again = spool_in(tmp_path)
    found = left_in(again)
    with pytest.raises((ValueError, SpoolError)):
        again.load(found)
    again.set_aside(found)
    again.close()
    assert not path.exists()
    (kept,) = tmp_path.glob("*.rejected")
    assert kept.name.endswith("-000000000001.rejected")
    assert bodies(spool_in(tmp_path)) == []


def test_item_beyond_the_limit_is_kept_in_memory_and_then_dropped_but_for_needed_ones(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, max_spool_bytes=10, max_memory_bytes=5)
    written(spool, delivery(b"x" * 8))
    spool.append(delivery(b"y" * 3))
    spool.append(delivery(b"z" * 3))
    written(spool, delivery(b"y" * 3, "state"))
    assert [(item.size, item.path is None) for item in items(spool)] == [(8, False), (3, True), (3, False)]
    assert (spool._counters.dropped_spool_full, spool._counters.dropped_bytes) == (1, 3)
    spool.remove(items(spool)[0])
    spool.sync()
    assert spool.on_disk == 2


def test_rejected_items_are_kept_as_they_are_within_the_limit(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, max_spool_bytes=1000, max_memory_bytes=1, max_rejected_bytes=1200)
    whole = written(spool, delivery(b"x" * 60)).read_bytes()
    path = spool.set_aside(items(spool)[0])
    assert path is not None
    assert path.read_bytes() == whole
    written(spool, delivery(b"y" * 1000))
    spool.append(delivery(b"z"))
    beyond, in_memory = items(spool)
    kept = spool.set_aside(in_memory)
    assert kept is not None
    assert kept.read_bytes().endswith(b"\nz")
    assert spool.set_aside(beyond) is None
    assert (spool.size, len(spool)) == (0, 0)
    spool.close()
    assert set(tmp_path.iterdir()) == {path, kept}
    assert bodies(spool_in(tmp_path)) == []


def test_only_the_same_project_and_key_adopt_at_once(tmp_path: Path) -> None:
    for project, key in (("a", "1"), ("a", "2"), ("b", "1")):
        spool = spool_in(tmp_path, project=project, key=key)
        written(spool, delivery(f"{project}{key}".encode()))
        spool.close()
    spool = spool_in(tmp_path, project="a", key="1")
    assert bodies(spool) == [b"a1"]
    assert bodies(spool, other_keys=True) == [b"a2", b"a1"]
    assert bodies(spool, other_keys=True) == [b"a2", b"a1"]
    assert bodies(spool_in(tmp_path, project="b", key="1")) == [b"b1"]


def test_files_are_readable_by_their_user_only(tmp_path: Path) -> None:
    path = written(spool_in(tmp_path / "spool"), delivery(b"x"))
    for each in (tmp_path / "spool", path.parent, path):
        assert each.stat().st_mode & 0o077 == 0
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    written(spool_in(opened), delivery(b"x"))
    assert opened.stat().st_mode & 0o777 == 0o700


PLANTED: list[dict[str, object]] = [
    {"place": {"step": "../../other"}},
    {"place": {"step": "1"}},
    {"place": {"step": 1.5}},
    {"place": {"step": 1, "shards": "{attempt}"}},
    {"place": {}},
    {"place": [1]},
    {"kind": "rollouts"},
    {"kind": "DELETE"},
    {"run": {}},
    {"attempt": {}},
]


@pytest.mark.parametrize("change", PLANTED, ids=str)
def test_request_that_no_client_makes_is_set_aside(tmp_path: Path, change: dict[str, object]) -> None:
    spool = spool_in(tmp_path)
    path = written(spool, delivery(b"x"))
    spool.close()
    head, _, body = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(head) | change).encode() + b"\n" + body)
    again = spool_in(tmp_path)
    with pytest.raises(ValueError):
        again.load(left_in(again))


def test_link_in_the_spool_is_not_followed(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    path = written(spool, delivery(b"secret"))
    spool.close()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    again = spool_in(tmp_path / "spool")
    with pytest.raises(SpoolError):
        again.load(left_in(again))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / path.parent.name).symlink_to(path.parent)
    assert bodies(spool_in(linked)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folders_of_other_users_are_neither_read_nor_used(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    folder = written(spool, delivery(b"planted")).parent
    spool.close()
    os.chown(folder, 12345, 12345)
    assert bodies(spool_in(tmp_path)) == []
    os.chown(folder, 0, 0)
    folder.chmod(0o777)
    assert bodies(spool_in(tmp_path)) == []
    folder.chmod(0o700)
    assert bodies(spool_in(tmp_path)) == [b"planted"]
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from tests.foreshock.client.test_spool import delivery, spool_in
        os.setuid(23456)
        spool_in(Path(sys.argv[1])).adopt()
        spool_in(Path(sys.argv[1])).append(delivery(b"x"))
    """)
    # Not below pytest's folder, which other users may not enter.
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, 12345, 12345)
        Path(name).chmod(0o777)
        done = subprocess.run([sys.executable, "-c", program, name], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr.count("belongs to another user (uid 12345)") == 2, done.stderr


def test_disk_that_is_full_from_the_start_costs_no_descriptor_and_no_file(tmp_path: Path) -> None:
    """The disk takes names, but no content: the lock of the process's own folder is made, and cannot be written."""
    left = spool_in(tmp_path)
    written(left, delivery(b"left"))
    left.close()
    program = textwrap.dedent("""
        import os, resource, sys
        from pathlib import Path
        from tests.foreshock.client.test_spool import bodies, delivery, spool_in
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        spool = spool_in(Path(sys.argv[1]))
        print(bodies(spool))
        before = os.listdir("/proc/self/fd")
        for number in range(20):
            spool.append(delivery(b"x"))
        print(spool._counters.dropped_spool_full, len(os.listdir("/proc/self/fd")) - len(before))
        spool.close()
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "20 0"], done.stderr
    assert done.stderr.count("cannot be used") == 1
    assert len(list(tmp_path.iterdir())) == 1
    # What could not be adopted on a full disk is adopted once there is room.
    assert bodies(spool_in(tmp_path)) == [b"left"]


def test_folder_that_another_client_removes_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        ended = spool_in(tmp_path / "spool")
        written(ended, delivery(b"x"))
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
    assert len(bodies(spool)) == 2
    assert first not in spool._locks


def test_folder_without_locks_is_used_and_adopted_once_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("foreshock.client.spool.fcntl.flock", refuse)
    written(spool_in(tmp_path), delivery(b"first"))
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
