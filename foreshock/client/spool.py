"""The spool: the undelivered items of a client, in a folder. Everything is written here before it is sent.

    <directory>/<process>/lock               held while its process lives; names host and process
    <directory>/<process>/000000000012.item  a line of JSON, then the bytes of the request
    <directory>/1764000000000000-000000000012.rejected  an item that the service refused, kept as it was

A file is written under a temporary name and renamed, so that a killed process leaves complete items or none. It is
deleted when the service has it. The numbers give the order of sending. Once the service fails to take an item, `sync`
makes what waits survive a loss of power too.

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
import math
import os
import shutil
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
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
    write_whole,
)
from foreshock.client.reporting import Counters, LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.clock import now_us
from foreshock.errors import SpoolError
from foreshock.parsing import parse_json

_ITEM, _REJECTED = ".item", ".rejected"
_LOCK = "lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(slots=True, eq=False)
class Item:
    """An undelivered item: on disk at `path`, or in memory as `delivery` while the disk does not take it.

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


class Spool:
    """The undelivered items of one process, in the order of sending. Safe from any thread.

    An item that the disk does not take is kept in memory, within `max_memory_bytes`; beyond them it is dropped.
    """

    def __init__(self, settings: ClientSettings, project: str, counters: Counters, log: LogOnce) -> None:
        """Set the limits. The directory is created by the first write."""
        self.directory = settings.spool_directory
        self.size = 0
        """Size of the bodies on disk that this process has written or adopted, in bytes."""
        self._settings = settings
        self._project = f"-{_short_digest(settings.url.rstrip('/'))}-{_short_digest(project)}-"
        self._owner = f"{self._project}{_short_digest(settings.api_key or '')}"
        self._counters = counters
        self._log = log
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._appended = 0
        self._own: Path | None = None
        self._locks: dict[Path, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def on_disk(self) -> int:
        """Number of items that survive the end of this process."""
        with self._lock:
            return sum(item.path is not None for item in self._items)

    def adopt(self, *, other_keys: bool = False) -> None:
        """Put the items of ended processes of this service, project and key (or other keys) in front, oldest first."""
        found: list[Item] = []
        with self._lock:
            try:
                with as_spool_error(self.directory):
                    if self.directory.is_dir():
                        require_private(self.directory)
                    for folder in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
                        name = folder.name
                        wanted = name.endswith(self._owner) or (other_keys and self._project in name)
                        # Folders that are not this user's alone may hold what others planted.
                        if wanted and name[0] != "." and folder not in self._locks and is_private_folder(folder):
                            found += self._adopt_folder(folder)
            except SpoolError as error:
                self._log.warning("spool", f"{error}; data of earlier processes in it is not sent")
            self._items.extendleft(reversed(found))
            self.size += sum(item.size for item in found)
        self._counters.add(recovered=len(found))

    def append(self, delivery: Delivery) -> None:
        """Add a delivery: it then survives this process, unless the disk does not take it."""
        with self._lock:
            self._appended += 1
            item = Item(len(delivery.body), delivery.registration.run_identity, self._appended, delivery=delivery)
            if not self._write(item) and not delivery.needed:
                in_memory = sum(each.size for each in self._items if each.delivery is not None)
                if in_memory + item.size > self._settings.max_memory_bytes:
                    self._counters.add(dropped_spool_full=1, dropped_bytes=item.size)
                    return
            self._items.append(item)

    def next(self, seconds_until: Callable[[Item], float]) -> tuple[float, Item | None]:
        """Return the first item that can be sent now, else the one that can be sent first, and in how many seconds."""
        with self._lock:
            earliest: tuple[float, Item | None] = math.inf, None
            for item in self._items:
                seconds = seconds_until(item)
                if seconds < earliest[0]:
                    earliest = seconds, item
                if seconds <= 0.0:
                    break
            return earliest

    def load(self, item: Item) -> Delivery:
        """Read a delivery. Raises ValueError if it is damaged or no request of a client, SpoolError if unreadable."""
        if item.delivery is not None:
            return item.delivery
        assert item.path is not None
        with as_spool_error(self.directory):
            data = read_own(item.path)
        end = data.find(b"\n")
        return Delivery.from_metadata(data[: max(end, 0)], memoryview(data)[end + 1 :])

    def remove(self, item: Item) -> None:
        """Remove an item that was delivered."""
        with self._lock:
            try:
                self._delete(item)
            except SpoolError as error:
                self._log.warning("spool", str(error))
            self._items.remove(item)

    def set_aside(self, item: Item) -> Path | None:
        """Keep a refused or damaged item as a file `.rejected`; return it, None at their limit. Raises SpoolError."""
        with self._lock, as_spool_error(self.directory):
            kept = sum(file.stat().st_size for file in self.directory.glob(f"*{_REJECTED}"))
            path = None
            if kept + item.size <= self._settings.max_rejected_bytes:
                stem = f"{item.number:012d}" if item.path is None else item.path.stem
                path = self.directory / f"{now_us()}-{stem}{_REJECTED}"
                if item.path is not None:
                    item.path.replace(path)
                elif item.delivery is not None:
                    make_private(self.directory)
                    write_whole(path, *_content(item.delivery))
            self._delete(item)
            self._items.remove(item)
        return path

    def sync(self) -> None:
        """Write what is in memory only, and make everything on disk survive a loss of power. Called by the sender."""
        with self._lock:
            for item in self._items:
                if item.delivery is not None and not self._write(item):
                    break
            waiting = [item for item in self._items if item.path is not None and not item.is_synced]
        if not waiting:
            return
        # Not under the lock: a disk may take milliseconds for each.
        try:
            with as_spool_error(self.directory):
                paths = [item.path for item in waiting if item.path is not None]
                for path in [*paths, *{path.parent for path in paths}]:
                    with contextlib.suppress(FileNotFoundError):
                        sync(path)
        except SpoolError as error:
            self._log.warning("spool", str(error))
            return
        for item in waiting:
            item.is_synced = True
        own = [item.size for item in waiting if item.number]
        self._counters.add(spooled=len(own), spooled_bytes=sum(own))

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

    def _write(self, item: Item) -> bool:
        """Write an item in memory to disk; False if the disk does not take it. The caller holds the lock."""
        delivery, limit = item.delivery, self._settings.max_spool_bytes
        assert delivery is not None
        is_full = self.size + item.size > limit and not delivery.needed
        try:
            if is_full:
                raise SpoolError(
                    f"the spool {self.directory} is full: it holds {self.size:,} of at most {limit:,} bytes"
                )
            with as_spool_error(self.directory):
                path = self._own_folder() / f"{item.number:012d}{_ITEM}"
                write_whole(path, *_content(delivery))
        except SpoolError as error:
            self._log.warning(
                "spool full" if is_full else "spool",
                f"{error}; items that do not fit into memory are dropped until the service takes some",
            )
            return False
        self.size += item.size
        item.path, item.delivery = path, None
        return True

    def _delete(self, item: Item) -> None:
        if item.path is not None:
            with as_spool_error(self.directory):
                item.path.unlink(missing_ok=True)
            self.size -= item.size

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
    """Return the locked file of a folder, None if its process is still running or it is not the folder of a process."""
    with contextlib.ExitStack() as unless_held:
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        unless_held.callback(os.close, lock)
        if not _try_lock(lock):
            return None
        unless_held.pop_all()
        return lock


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
    except PermissionError:
        pass  # The process of another user.
    return True
