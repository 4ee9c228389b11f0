"""The spool: undelivered items on disk.

    <directory>/<process>/lock                        held while its process lives
    <directory>/<process>/000000000012-<digest>.item  a line of JSON, then the bytes of the request
    <directory>/rejected/…                            items that the service rejected (`rejected.py`)

A file is written under a temporary name and renamed, so that a killed process leaves complete items or none. `sync`
makes items survive a loss of power. The numbers give the order of sending. Releases up to 0.1.0 wrote an item as two
files, `….body` and `….json`; these are still read.

The name of a folder ends with digests of the project and the API key of its process (`SpoolOwner`). A folder whose lock
is free belonged to a process that has ended: the next client of the same project and key adopts it, those of the
project's other keys once the service has accepted something from that client. Use one spool directory per service.

Files in it are sent with the API key, so only folders and files of this user that no one else may write are read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from foreshock.client.deliveries import Delivery, short_digest
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
from foreshock.client.rejected import DAMAGED, ITEM, REJECTED_FOLDER, RejectedItems
from foreshock.clock import now_us
from foreshock.errors import SpoolError

__all__ = [
    "Spool",
    "SpoolFullError",
    "SpoolOwner",
    "SpooledEntry",
    "WaitingFolder",
    "waiting_folders",
]

_LOCK = "lock"
_TEMPORARY = ".new-"


class SpoolFullError(SpoolError):
    """The spool has reached its size limit."""


@dataclass(frozen=True, slots=True)
class SpoolOwner:
    """The project and API key of a client, as digests that end the names of its folders."""

    project: str
    key: str

    @classmethod
    def of(cls, project: str, api_key: str | None) -> SpoolOwner:
        """Return the owner of a client's folders."""
        return cls(*(hashlib.sha256(text.encode()).hexdigest()[:8] for text in (project, api_key or "")))

    def owns(self, folder: Path) -> bool:
        """Return whether the folder is of the same project and key."""
        return folder.name.endswith(f"-{self.project}-{self.key}")

    def may_adopt(self, folder: Path) -> bool:
        """Return whether the folder is of the same project, or of a release that did not write the owner."""
        parts = folder.name.split("-")
        return len(parts) < 5 or parts[3] == self.project


@dataclass(frozen=True, slots=True)
class SpooledEntry:
    """One delivery on disk. `size` is the size of its body in bytes, `run` its run's project and key."""

    path: Path
    size: int
    kind: str
    run: tuple[str, str]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold it; the first one makes it valid."""
        return (self.path,) if self.path.suffix == ITEM else (self.path, self.path.with_suffix(".body"))

    @property
    def folder(self) -> Path:
        """The folder of the process that wrote it."""
        return self.path.parent


@dataclass(frozen=True, slots=True)
class WaitingFolder:
    """Undelivered entries of one process; `in_use`: it is still running."""

    path: Path
    items: int
    bytes: int
    in_use: bool


def waiting_folders(directory: Path) -> list[WaitingFolder]:
    """Return the folders with undelivered entries, oldest first, whoever wrote them. Raises SpoolError."""
    found: list[WaitingFolder] = []
    with as_spool_error(directory):
        for folder in _process_folders(directory):
            entries = list(_entries_of(folder))
            if entries:
                lock = _lock_of(folder)
                if lock is not None:
                    os.close(lock)
                size = sum(entry.size for entry in entries)
                found.append(WaitingFolder(folder, len(entries), size, in_use=lock is None))
    return found


class Spool:
    """A spool directory as used by one process, by one thread at a time."""

    def __init__(self, directory: Path, *, owner: SpoolOwner, max_bytes: int, max_rejected_bytes: int) -> None:
        """Set the limits in bytes. The directory is created by the first write."""
        self.directory = directory
        self.owner = owner
        self.rejected = RejectedItems(directory, max_bytes=max_rejected_bytes)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._own: Path | None = None
        self._locks: dict[Path, int] = {}
        self._released: set[Path] = set()

    @property
    def size(self) -> int:
        """Size of the bodies on disk that this process has written or adopted, in bytes."""
        return self._bytes

    def adopt(self, *, other_keys: bool = False) -> list[SpooledEntry]:
        """Take over the entries of processes of this owner that have ended, oldest first. Raises SpoolError.

        `other_keys`: also those of other keys of the project.
        """
        entries: list[SpooledEntry] = []
        with as_spool_error(self.directory):
            if not self.directory.is_dir():
                return []
            require_private(self.directory)
            for folder in _process_folders(self.directory):
                wanted = self.owner.owns(folder) or (other_keys and self.owner.may_adopt(folder))
                if not wanted or folder in self._released or folder in self._locks:
                    continue
                lock = _lock_of(folder)
                if lock is not None:
                    self._locks[folder] = lock
                    _remove_incomplete(folder)
                    entries += _entries_of(folder)
        self._bytes += sum(entry.size for entry in entries)
        return entries

    def release(self, folder: Path, entries: list[SpooledEntry]) -> None:
        """Leave an adopted folder, and `entries` of it, to another client."""
        self._released.add(folder)
        self._bytes -= sum(entry.size for entry in entries)
        lock = self._locks.pop(folder, None)
        if lock is not None:
            os.close(lock)

    def write(self, sequence: int, delivery: Delivery) -> SpooledEntry:
        """Write a delivery, which then survives this process; `sync` makes it survive a loss of power.

        Raises SpoolFullError at the size limit, SpoolError if the disk fails.
        """
        size = len(delivery.body)
        if self._bytes + size > self._max_bytes and not delivery.needed:
            raise SpoolFullError(
                f"the spool {self.directory} is full: it holds {self._bytes:,} of at most {self._max_bytes:,} bytes"
            )
        with as_spool_error(self.directory):
            metadata = delivery.metadata()
            path = self._own_folder() / f"{sequence:012d}-{short_digest(metadata)}{ITEM}"
            write_whole(path, json.dumps(metadata).encode() + b"\n", delivery.body)
        self._bytes += size
        return SpooledEntry(path, size, delivery.kind, delivery.registration.run_identity)

    def sync(self, entries: Iterable[SpooledEntry]) -> None:
        """Make written entries survive a loss of power: one sync an entry, one a folder. Raises SpoolError."""
        with as_spool_error(self.directory):
            folders = set()
            for entry in entries:
                sync(entry.path)
                folders.add(entry.folder)
            for folder in folders:
                sync(folder)

    def load(self, entry: SpooledEntry) -> Delivery:
        """Read a delivery. Raises ValueError if it is damaged or no request of a client, SpoolError if unreadable."""
        with as_spool_error(self.directory):
            if entry.path.suffix != ITEM:
                metadata, body = entry.files
                return Delivery.from_metadata(read_own(metadata), read_own(body))
            data = read_own(entry.path)
            end = data.find(b"\n")
            return Delivery.from_metadata(data[: max(end, 0)], memoryview(data)[end + 1 :])

    def remove(self, entry: SpooledEntry) -> None:
        """Delete a delivered entry. Raises SpoolError."""
        with as_spool_error(self.directory):
            for path in entry.files:
                path.unlink(missing_ok=True)
        self._bytes -= entry.size

    def set_aside(self, entry: SpooledEntry) -> None:
        """Move a damaged entry into the folder `rejected`. Raises SpoolError."""
        with as_spool_error(self.directory):
            folder = self.rejected.make_folder()
            for path in entry.files:
                if path.exists() or path.is_symlink():
                    path.replace(folder / f"{DAMAGED}{path.name}")
        self._bytes -= entry.size

    def close(self) -> None:
        """Unlock the folders and remove the empty ones; the next client adopts the remaining entries."""
        for folder, lock in self._locks.items():
            if not any(_valid_paths(folder)):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        self._locks.clear()
        self._own = None

    def close_inherited_locks(self) -> None:
        """Close the locks inherited by a forked child; the parent keeps them."""
        for lock in self._locks.values():
            with contextlib.suppress(OSError):
                os.close(lock)
        self._locks.clear()
        self._own = None

    def _own_folder(self) -> Path:
        """Return this process's folder, which is locked before it gets its visible name."""
        if self._own is None:
            make_private(self.directory)
            name = f"{now_us()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{self.owner.project}-{self.owner.key}"
            temporary = self.directory / f"{_TEMPORARY}{name}"
            temporary.mkdir(mode=0o700)
            lock = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own = temporary.rename(self.directory / name)
            self._locks[self._own] = lock
            sync(self.directory)
        return self._own


def _process_folders(directory: Path) -> Iterator[Path]:
    """Yield the folders of processes, oldest first, that are this user's alone."""
    for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
        if folder.name != REJECTED_FOLDER and not folder.name.startswith(".") and is_private_folder(folder):
            yield folder


def _valid_paths(folder: Path) -> Iterator[Path]:
    """Yield the files that make an entry valid."""
    return (path for path in folder.iterdir() if path.suffix in (ITEM, ".json"))


def _entries_of(folder: Path) -> Iterator[SpooledEntry]:
    """Yield the entries of a folder in the order of sending; damaged ones have the kind "unreadable"."""
    for path in sorted(_valid_paths(folder)):
        size, kind, run = 0, "unreadable", ("", "")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open_own(path) as file:
                values = json.loads(file.readline() if path.suffix == ITEM else file.read())
            size = int(values["size"])
            kind, run = str(values["kind"]), (str(values["run"]["project"]), str(values["run"]["key"]))
        yield SpooledEntry(path, size, kind, run)


def _remove_incomplete(folder: Path) -> None:
    """Remove what a killed process left of items that it had not written, or had delivered."""
    for path in list(folder.iterdir()):
        if path.suffix == ".partial" or (path.suffix == ".body" and not path.with_suffix(".json").exists()):
            path.unlink()


def _lock_of(folder: Path) -> int | None:
    """Return the locked file of a folder, None if its process is still running or it is no folder of a process."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
