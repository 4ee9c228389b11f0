"""The spool: undelivered items on disk.

    <directory>/<process>/lock                       held while its process lives
    <directory>/<process>/000000000012-<digest>.body the bytes of the request
    <directory>/<process>/000000000012-<digest>.json the rest of the request; written last, it makes the entry valid
    <directory>/rejected/…                           items that the service rejected (`rejected.py`)

Every file is written under a temporary name, synced and renamed, so that a crash leaves complete entries or none. The
numbers give the order of sending. The name of a folder ends with digests of the project and the API key of its process
(`SpoolOwner`). A folder whose lock is free belonged to a process that has ended: the next client of the same project
and key adopts it, those of the project's other keys once the service has accepted something from that client. Use one
spool directory per service.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshock.client.deliveries import Delivery
from foreshock.client.private_files import (
    as_spool_error,
    is_private_folder,
    make_private,
    read_own,
    require_private,
    sync_folder,
    write_durably,
)
from foreshock.client.rejected import DAMAGED, REJECTED_FOLDER, RejectedItems
from foreshock.clock import now_us
from foreshock.digests import digest_of_bytes
from foreshock.errors import SpoolError

__all__ = ["Spool", "SpoolFullError", "SpoolOwner", "SpooledEntry", "WaitingFolder", "waiting_folders"]

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
    """One delivery on disk. `size` is the size of the body in bytes, `run` its run's project and key."""

    body_path: Path
    size: int
    kind: str
    run: tuple[str, str]

    @property
    def metadata_path(self) -> Path:
        """The file that makes the entry valid."""
        return self.body_path.with_suffix(".json")

    @property
    def folder(self) -> Path:
        """The folder of the process that wrote it."""
        return self.body_path.parent


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
        if not directory.is_dir():
            return found
        for folder in sorted(directory.iterdir()):
            if folder.name == REJECTED_FOLDER or folder.name.startswith(".") or not is_private_folder(folder):
                continue
            entries = [path.with_suffix(".body") for path in folder.glob("*.json")]
            if entries:
                size = sum(path.stat().st_size for path in entries if path.exists())
                lock = _lock_of(folder)
                if lock is not None:
                    os.close(lock)
                found.append(WaitingFolder(folder, len(entries), size, in_use=lock is None))
    return found


class Spool:
    """A spool directory as used by one process, by one thread at a time."""

    def __init__(self, directory: Path, *, owner: SpoolOwner, max_bytes: int, max_rejected_bytes: int) -> None:
        """Set the limits in bytes. The directory is created by the first write."""
        self.directory = directory
        self.owner = owner
        self._max_bytes = max_bytes
        self._rejected = RejectedItems(directory, max_bytes=max_rejected_bytes)
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
            for folder in sorted(self.directory.iterdir()):
                skipped = folder.name == REJECTED_FOLDER or folder.name.startswith(".") or folder in self._released
                wanted = self.owner.owns(folder) or (other_keys and self.owner.may_adopt(folder))
                if skipped or not wanted or folder in self._locks or not is_private_folder(folder):
                    continue
                if self._lock(folder):
                    entries += self._entries_of(folder)
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
        """Write a delivery durably. Raises SpoolFullError at the size limit, SpoolError if the disk fails."""
        size = len(delivery.body)
        if self._bytes + size > self._max_bytes and not delivery.needed:
            raise SpoolFullError(
                f"the spool {self.directory} is full: it holds {self._bytes:,} of at most {self._max_bytes:,} bytes"
            )
        with as_spool_error(self.directory):
            folder = self._own_folder()
            digest = digest_of_bytes(delivery.body).removeprefix("sha256:")[:16]
            body_path = folder / f"{sequence:012d}-{digest}.body"
            write_durably(body_path, delivery.body)
            write_durably(body_path.with_suffix(".json"), delivery.metadata_json().encode())
            sync_folder(folder)
        self._bytes += size
        return SpooledEntry(body_path, size, delivery.kind, delivery.registration.run_identity)

    def load(self, entry: SpooledEntry) -> Delivery:
        """Read a delivery. Raises ValueError if it is damaged or no request of a client, SpoolError if unreadable."""
        with as_spool_error(self.directory):
            return Delivery.from_metadata(read_own(entry.metadata_path), read_own(entry.body_path))

    def remove(self, entry: SpooledEntry) -> None:
        """Delete a delivered entry. Raises SpoolError."""
        with as_spool_error(self.directory):
            # The metadata first: a body without metadata is not a valid entry.
            entry.metadata_path.unlink(missing_ok=True)
            entry.body_path.unlink(missing_ok=True)
        self._bytes -= entry.size

    def reject(self, delivery: Delivery, problem: Mapping[str, Any]) -> Path:
        """Keep a rejected delivery and its problem; the body only within the size limit. Raises SpoolError."""
        return self._rejected.keep(delivery, problem)

    def set_aside(self, entry: SpooledEntry) -> None:
        """Move a damaged entry into the folder `rejected`. Raises SpoolError."""
        with as_spool_error(self.directory):
            folder = self._rejected.make_folder()
            for path in (entry.metadata_path, entry.body_path):
                if path.exists() or path.is_symlink():
                    path.replace(folder / f"{DAMAGED}{path.name}")
        self._bytes -= entry.size

    def close(self) -> None:
        """Unlock the folders and remove the empty ones; the next client adopts the remaining entries."""
        for folder, lock in self._locks.items():
            if not any(folder.glob("*.json")):
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
            sync_folder(self.directory)
        return self._own

    def _lock(self, folder: Path) -> bool:
        """Lock a folder; False if its process is still running."""
        lock = _lock_of(folder)
        if lock is None:
            return False
        self._locks[folder] = lock
        return True

    def _entries_of(self, folder: Path) -> Iterator[SpooledEntry]:
        for body_path in folder.glob("*.body"):
            if not body_path.with_suffix(".json").exists():
                body_path.unlink()
        for leftover in folder.glob("*.partial"):
            leftover.unlink()
        for metadata_path in sorted(folder.glob("*.json")):
            body_path = metadata_path.with_suffix(".body")
            try:
                values = json.loads(read_own(metadata_path))
                kind, run = str(values["kind"]), (str(values["run"]["project"]), str(values["run"]["key"]))
            except (OSError, ValueError, KeyError, TypeError):
                kind, run = "unreadable", ("", "")
            size = body_path.stat().st_size if body_path.exists() else 0
            yield SpooledEntry(body_path, size, kind, run)


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
