"""The spool: undelivered items on disk.

    <directory>/<process>/lock                       held while its process lives
    <directory>/<process>/000000000012-<digest>.body the bytes of the request
    <directory>/<process>/000000000012-<digest>.json the rest of the request; written last, it makes the entry valid
    <directory>/rejected/…                           items that the service rejected, with its problem+json

Every file is written under a temporary name, synced and renamed, so that a crash leaves complete entries or none. The
numbers give the order of sending. A folder whose lock is free belonged to a process that has ended: the next client
adopts it. Use one spool directory per service.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshock.client.deliveries import Delivery
from foreshock.clock import now_us
from foreshock.digests import digest_of_bytes
from foreshock.errors import SpoolError

__all__ = ["Spool", "SpoolFullError", "SpooledEntry"]

_LOCK = "lock"
_REJECTED = "rejected"
_TEMPORARY = ".new-"


class SpoolFullError(SpoolError):
    """The spool has reached its size limit."""


@dataclass(frozen=True, slots=True)
class SpooledEntry:
    """One delivery on disk. `size` is the size of the body in bytes."""

    body_path: Path
    size: int
    kind: str

    @property
    def metadata_path(self) -> Path:
        """The file that makes the entry valid."""
        return self.body_path.with_suffix(".json")


class Spool:
    """A spool directory as used by one process, by one thread at a time."""

    def __init__(self, directory: Path, *, max_bytes: int, max_rejected_bytes: int) -> None:
        """Set the limits in bytes. The directory is created by the first write."""
        self.directory = directory
        self._max_bytes = max_bytes
        self._max_rejected_bytes = max_rejected_bytes
        self._bytes = 0
        self._own: Path | None = None
        self._locks: dict[Path, int] = {}

    @property
    def size(self) -> int:
        """Size of the bodies on disk that this process has written or adopted, in bytes."""
        return self._bytes

    def adopt(self) -> list[SpooledEntry]:
        """Take over the entries of processes that have ended, oldest first. Raises SpoolError."""
        entries: list[SpooledEntry] = []
        with _as_spool_error(self.directory):
            if not self.directory.is_dir():
                return []
            for folder in sorted(self.directory.iterdir()):
                if folder.name in (_REJECTED,) or folder.name.startswith(".") or folder in self._locks:
                    continue
                if self._lock(folder):
                    entries += self._entries_of(folder)
        self._bytes += sum(entry.size for entry in entries)
        return entries

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
        return SpooledEntry(body_path, size, delivery.kind)

    def load(self, entry: SpooledEntry) -> Delivery:
        """Read a delivery. Raises ValueError if it is damaged, SpoolError if it cannot be read."""
        with _as_spool_error(self.directory):
            return Delivery.from_metadata(entry.metadata_path.read_bytes(), entry.body_path.read_bytes())

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
            folder = self.directory / _REJECTED
            folder.mkdir(parents=True, exist_ok=True)
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
            folder = self.directory / _REJECTED
            folder.mkdir(parents=True, exist_ok=True)
            for path in (entry.metadata_path, entry.body_path):
                if path.exists():
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

    def _own_folder(self) -> Path:
        """Return this process's folder, which is locked before it gets its visible name."""
        if self._own is None:
            name = f"{now_us()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            temporary = self.directory / f"{_TEMPORARY}{name}"
            temporary.mkdir(parents=True, mode=0o700)
            lock = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own = temporary.rename(self.directory / name)
            self._locks[self._own] = lock
            _sync_folder(self.directory)
        return self._own

    def _lock(self, folder: Path) -> bool:
        """Lock a folder; False if its process is still running."""
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
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
                kind = str(json.loads(metadata_path.read_bytes())["kind"])
            except (ValueError, KeyError, TypeError):
                kind = "unreadable"
            size = body_path.stat().st_size if body_path.exists() else 0
            yield SpooledEntry(body_path, size, kind)


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
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
