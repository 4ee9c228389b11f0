"""The spool: undelivered items on disk.

    <directory>/<process>/lock                       held while its process lives
    <directory>/<process>/000000000012-<digest>.body the bytes of the request
    <directory>/<process>/000000000012-<digest>.json the rest of the request; written last, it makes the entry valid
    <directory>/rejected/…                           items that the service rejected, with its problem+json

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
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshock.client.deliveries import Delivery
from foreshock.clock import now_us
from foreshock.digests import digest_of_bytes
from foreshock.errors import SpoolError

__all__ = ["Spool", "SpoolFullError", "SpoolOwner", "SpooledEntry"]

_LOCK = "lock"
_REJECTED = "rejected"
_TEMPORARY = ".new-"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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


class Spool:
    """A spool directory as used by one process, by one thread at a time."""

    def __init__(self, directory: Path, *, owner: SpoolOwner, max_bytes: int, max_rejected_bytes: int) -> None:
        """Set the limits in bytes. The directory is created by the first write."""
        self.directory = directory
        self.owner = owner
        self._max_bytes = max_bytes
        self._max_rejected_bytes = max_rejected_bytes
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
        with _as_spool_error(self.directory):
            if not self.directory.is_dir():
                return []
            self._require_private()
            for folder in sorted(self.directory.iterdir()):
                skipped = folder.name == _REJECTED or folder.name.startswith(".") or folder in self._released
                wanted = self.owner.owns(folder) or (other_keys and self.owner.may_adopt(folder))
                if skipped or not wanted or folder in self._locks or not _is_private_folder(folder):
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
        with _as_spool_error(self.directory):
            folder = self._own_folder()
            digest = digest_of_bytes(delivery.body).removeprefix("sha256:")[:16]
            body_path = folder / f"{sequence:012d}-{digest}.body"
            _write_durably(body_path, delivery.body)
            _write_durably(body_path.with_suffix(".json"), delivery.metadata_json().encode())
            _sync_folder(folder)
        self._bytes += size
        return SpooledEntry(body_path, size, delivery.kind, delivery.registration.run_identity)

    def load(self, entry: SpooledEntry) -> Delivery:
        """Read a delivery. Raises ValueError if it is damaged or no request of a client, SpoolError if unreadable."""
        with _as_spool_error(self.directory):
            return Delivery.from_metadata(_read_own(entry.metadata_path), _read_own(entry.body_path))

    def remove(self, entry: SpooledEntry) -> None:
        """Delete a delivered entry. Raises SpoolError."""
        with _as_spool_error(self.directory):
            # The metadata first: a body without metadata is not a valid entry.
            entry.metadata_path.unlink(missing_ok=True)
            entry.body_path.unlink(missing_ok=True)
        self._bytes -= entry.size

    def reject(self, delivery: Delivery, problem: Mapping[str, Any]) -> Path:
        """Keep a rejected delivery and its problem; the body only within the size limit. Raises SpoolError."""
        with _as_spool_error(self.directory):
            folder = self._rejected_folder()
            digest = digest_of_bytes(delivery.body).removeprefix("sha256:")[:16]
            path = folder / f"{now_us()}-{digest}.body"
            kept = sum(file.stat().st_size for file in folder.glob("*.body"))
            if kept + len(delivery.body) <= self._max_rejected_bytes:
                _write_durably(path, delivery.body)
            record = {"problem": dict(problem), "request": json.loads(delivery.metadata_json())}
            _write_durably(path.with_suffix(".json"), json.dumps(record, indent=1, default=str).encode())
        return path

    def set_aside(self, entry: SpooledEntry) -> None:
        """Move a damaged entry into the folder `rejected`. Raises SpoolError."""
        with _as_spool_error(self.directory):
            folder = self._rejected_folder()
            for path in (entry.metadata_path, entry.body_path):
                if path.exists() or path.is_symlink():
                    path.replace(folder / f"damaged-{path.name}")
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

    def _require_private(self) -> None:
        """Refuse a directory of another user, or one below the common temporary folder that is reached through one."""
        user = os.geteuid()
        temporary = Path(tempfile.gettempdir())
        for path in (self.directory, *self.directory.parents):
            if path != self.directory and temporary not in path.parents:
                break
            found = path.lstat()
            # Root may use a folder of another user, such as a mounted volume.
            if found.st_uid not in (user, 0) and user != 0:
                raise SpoolError(
                    f"{path} belongs to another user (uid {found.st_uid}): its files would be sent with your API key; "
                    "set FORESHOCK_SPOOL_DIRECTORY to a folder of your own"
                )
        mode = self.directory.stat().st_mode
        if mode & _WRITABLE_BY_OTHERS and self.directory.stat().st_uid == user:
            self.directory.chmod(stat.S_IMODE(mode) & ~_WRITABLE_BY_OTHERS)

    def _own_folder(self) -> Path:
        """Return this process's folder, which is locked before it gets its visible name."""
        if self._own is None:
            self._make_directory()
            name = f"{now_us()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{self.owner.project}-{self.owner.key}"
            temporary = self.directory / f"{_TEMPORARY}{name}"
            temporary.mkdir(mode=0o700)
            lock = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own = temporary.rename(self.directory / name)
            self._locks[self._own] = lock
            _sync_folder(self.directory)
        return self._own

    def _rejected_folder(self) -> Path:
        self._make_directory()
        folder = self.directory / _REJECTED
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _make_directory(self) -> None:
        # `mkdir(parents=True)` gives its mode to the last folder only.
        for path in reversed((self.directory, *self.directory.parents)):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        self._require_private()

    def _lock(self, folder: Path) -> bool:
        """Lock a folder; False if its process is still running."""
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
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
                values = json.loads(_read_own(metadata_path))
                kind, run = str(values["kind"]), (str(values["run"]["project"]), str(values["run"]["key"]))
            except (OSError, ValueError, KeyError, TypeError):
                kind, run = "unreadable", ("", "")
            size = body_path.stat().st_size if body_path.exists() else 0
            yield SpooledEntry(body_path, size, kind, run)


def _is_private_folder(folder: Path) -> bool:
    """Return whether the folder is this user's, no link, and no one else may write it."""
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & _WRITABLE_BY_OTHERS


def _read_own(path: Path) -> bytes:
    """Return the content of a regular file of this user. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of this user")
        return file.read()


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _as_spool_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except SpoolError:
        raise
    except OSError as error:
        raise SpoolError(f"the spool directory {directory} cannot be used: {error.strerror or error}") from error
