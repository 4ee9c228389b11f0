"""The spool: undelivered items on disk.

    <directory>/<process>/lock               held while its process lives; names host and process
    <directory>/<process>/000000000012.item  a line of JSON, then the bytes of the request
    <directory>/1764000000000000-000000000012.rejected  an item that the service refused, kept as it was

A file is written under a temporary name and renamed, so that a killed process leaves complete items or none. `sync`
makes items survive a loss of power. The numbers give the order of sending.

The name of a folder ends with digests of the service's address, the project and the API key of its process. A folder
whose lock is free belonged to a process that has ended: the next client of the same service, project and key adopts it,
and those of the project's other keys once the service has accepted something from that client. What is for another
service waits for a client of that one.

Files in it are sent with the API key, so only folders and files of this user that no one else may write are read.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from foreshock.client.deliveries import Delivery
from foreshock.client.private_files import (
    as_spool_error,
    is_private_folder,
    make_private,
    open_own,
    read_own,
    require_private,
    sync,
    sync_file_system,
    write_whole,
)
from foreshock.clock import now_us
from foreshock.errors import SpoolError
from foreshock.parsing import parse_json

_ITEM, _REJECTED = ".item", ".rejected"
_LOCK = "lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_MOST_SYNCS = 16


class SpoolFullError(SpoolError):
    """The spool has reached its size limit."""


@dataclass(slots=True, eq=False)
class Item:
    """An undelivered item: on disk at `path`, or in memory as `delivery` if the disk does not take it.

    `size` is the size of its body in bytes, `run` its run's project and key, `number` its place in the order of this
    process (0: an earlier process wrote it).
    """

    size: int
    run: tuple[str, str]
    number: int = 0
    path: Path | None = None
    delivery: Delivery | None = None
    is_synced: bool = False
    """True if it survives a loss of power."""
    is_doubted: bool = False
    """True if the service called it invalid once."""
    is_spooled: bool = False
    """True if it was counted as one that waits on disk."""


class Spool:
    """A spool directory as used by one process, by one thread at a time."""

    def __init__(
        self, directory: Path, *, url: str, project: str, api_key: str | None, max_bytes: int, max_rejected_bytes: int
    ) -> None:
        """Set the limits in bytes. The directory is created by the first write."""
        self.directory = directory
        self.size = 0
        """Size of the bodies on disk that this process has written or adopted, in bytes."""
        self._project = f"-{_short_digest(url.rstrip('/'))}-{_short_digest(project)}-"
        self._owner = f"{self._project}{_short_digest(api_key or '')}"
        self._max_bytes = max_bytes
        self._max_rejected_bytes = max_rejected_bytes
        self._own: Path | None = None
        self._locks: dict[Path, int] = {}

    def adopt(self, *, other_keys: bool = False) -> list[Item]:
        """Take over the items of processes of this service, project and key that have ended, oldest first.

        `other_keys`: also those of other keys of the project. Raises SpoolError.
        """
        items: list[Item] = []
        with as_spool_error(self.directory):
            if not self.directory.is_dir():
                return []
            require_private(self.directory)
            for folder in _process_folders(self.directory):
                wanted = folder.name.endswith(self._owner) or (other_keys and self._project in folder.name)
                if wanted and folder not in self._locks:
                    items += self._adopt_folder(folder)
        self.size += sum(item.size for item in items)
        return items

    def _adopt_folder(self, folder: Path) -> list[Item]:
        """Lock a folder and return its items. Nothing is locked, nor returned, if another client adopted it first.

        The other client may close, and remove the folder, between any two steps.
        """
        # An error: gone, or not readable. It stays for the next client, and the folders behind it are adopted.
        with contextlib.suppress(OSError), contextlib.ExitStack() as unused:
            lock = _lock_of(folder)
            if lock is None:
                return []
            unused.callback(os.close, lock)
            if os.fstat(lock).st_nlink:
                for path in folder.glob("*.partial"):
                    path.unlink()
                items = list(_items_of(folder))
                self._locks[folder] = lock
                unused.pop_all()
                return items
        return []

    def write(self, item: Item, delivery: Delivery) -> None:
        """Write a delivery, which then survives this process; `sync` makes it survive a loss of power.

        Raises SpoolFullError at the size limit, SpoolError if the disk fails.
        """
        if self.size + item.size > self._max_bytes and not delivery.needed:
            raise SpoolFullError(
                f"the spool {self.directory} is full: it holds {self.size:,} of at most {self._max_bytes:,} bytes"
            )
        with as_spool_error(self.directory):
            path = self._own_folder() / f"{item.number:012d}{_ITEM}"
            write_whole(path, *_content(delivery))
        self.size += item.size
        item.path = path

    def sync(self, items: Iterable[Item]) -> None:
        """Make written items survive a loss of power; items that were removed meanwhile are skipped. Raises SpoolError.

        A few are synced one by one, more by one sync of their file system: a disk commits a hundred files a second.
        """
        with as_spool_error(self.directory):
            paths = [item.path for item in items if item.path is not None]
            if len(paths) > _MOST_SYNCS and sync_file_system(self.directory):
                return
            for path in [*paths, *{path.parent for path in paths}]:
                with contextlib.suppress(FileNotFoundError):
                    sync(path)

    def load(self, path: Path) -> Delivery:
        """Read a delivery. Raises ValueError if it is damaged or no request of a client, SpoolError if unreadable."""
        with as_spool_error(self.directory):
            data = read_own(path)
        end = data.find(b"\n")
        return Delivery.from_metadata(data[: max(end, 0)], memoryview(data)[end + 1 :])

    def remove(self, item: Item) -> None:
        """Delete a delivered item. Raises SpoolError."""
        if item.path is not None:
            with as_spool_error(self.directory):
                item.path.unlink(missing_ok=True)
            self.size -= item.size

    def set_aside(self, item: Item) -> Path | None:
        """Keep a rejected or damaged item as a file `.rejected`, which no client reads; return its path.

        None if such files have reached their limit: the item is deleted. Raises SpoolError.
        """
        with as_spool_error(self.directory):
            stem = f"{item.number:012d}" if item.path is None else item.path.stem
            path = self.directory / f"{now_us()}-{stem}{_REJECTED}"
            kept = sum(file.stat().st_size for file in self.directory.glob(f"*{_REJECTED}"))
            if kept + item.size > self._max_rejected_bytes:
                self.remove(item)
                return None
            if item.path is not None:
                item.path.replace(path)
                self.size -= item.size
            elif item.delivery is not None:
                make_private(self.directory)
                write_whole(path, *_content(item.delivery))
            sync(path)
            sync(self.directory)
        return path

    def close(self, *, in_forked_child: bool = False) -> None:
        """Unlock the folders and remove the empty ones; the next client adopts the remaining items.

        A forked child only closes what it inherited: its parent keeps the locks.
        """
        for folder, lock in self._locks.items():
            if not in_forked_child and not any(folder.glob(f"*{_ITEM}")):
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.close(lock)
        self._locks.clear()
        self._own = None

    def _own_folder(self) -> Path:
        """Return this process's folder, which is locked before it gets its visible name."""
        if self._own is None:
            make_private(self.directory)
            name = f"{now_us()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{self._owner}"
            temporary = self.directory / f".new-{name}"
            temporary.mkdir(mode=0o700)
            with contextlib.ExitStack() as unfinished:
                unfinished.callback(shutil.rmtree, temporary, ignore_errors=True)
                lock = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                unfinished.callback(os.close, lock)
                # A full disk takes the file, but not what is written into it.
                _try_lock(lock)
                self._own = temporary.rename(self.directory / name)
                unfinished.pop_all()
            self._locks[self._own] = lock
            sync(self.directory)
        return self._own


def _content(delivery: Delivery) -> tuple[bytes, bytes | memoryview]:
    return json.dumps(delivery.metadata()).encode() + b"\n", delivery.body


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _process_folders(directory: Path) -> Iterator[Path]:
    """Yield the folders of processes, oldest first, that are this user's alone."""
    for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not folder.name.startswith(".") and is_private_folder(folder):
            yield folder


def _items_of(folder: Path) -> Iterator[Item]:
    """Yield the items of a folder in the order of sending; one that cannot be read has no size and no run."""
    for path in sorted(folder.glob(f"*{_ITEM}")):
        item = Item(0, ("", ""), path=path)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open_own(path) as file:
                values = parse_json(file.readline())
            item.run = str(values["run"]["project"]), str(values["run"]["key"])
            item.size = int(values["size"])
        yield item


def _lock_of(folder: Path) -> int | None:
    """Return the locked file of a folder, None if its process is still running or it is no folder of a process."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_held = False
    try:
        is_held = _try_lock(lock)
    finally:
        if not is_held:
            os.close(lock)
    return lock if is_held else None


def _try_lock(lock: int) -> bool:
    """Lock an open file; False if a running process holds it.

    The file names its host and process. On a file system without locks (some network folders) only these decide: a
    folder of another host stays locked.
    """
    host = socket.gethostname()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return False
        holder = os.pread(lock, 300, 0).decode(errors="replace").split()
        if holder and (holder[0] != host or _is_running(holder[-1])):
            return False
    holder_now = f"{host} {os.getpid()}".encode()
    # In this order a full disk takes it: the block is there already.
    os.pwrite(lock, holder_now, 0)
    os.ftruncate(lock, len(holder_now))
    return True


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:
        # The process of another user.
        return True
    return True
