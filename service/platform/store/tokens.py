"""The token store: immutable files that the catalogue in the database names, in a folder or an S3-compatible store.

A file is written aside, then published under its name as a whole or not at all. A file that no catalogue row names (a
crash between publishing and the commit) is an orphan, which `removal.py` removes. No client string is part of a name;
names are made of the server's ids, integers and the body's digest:

    <run>/<attempt>/<step>/<shard>-<digest>-<upload>.parquet           rollouts of a shard
    <run>/<attempt>/<step>/scores/<job>-<digest>-<upload>.parquet      scores of a job
    <run>/<attempt>/<step>/exact/<job>-<digest>-<upload>.parquet       exact divergences of a job

`<upload>` is random, so that no two uploads share a file: the loser of a race removes only its own, and a file that no
row names stays one until it is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

_DIGEST_DIGITS = 16
_NAME = re.compile(
    r"(?P<run>[\w-]+)/(?P<attempt>\d{4,})/(?P<step>\d{9,})/"
    r"(?:(?P<shard>\d{5,})|(?P<kind>scores|exact)/(?P<job>[\w]+))-(?P<digest>[0-9a-f]+)(?:-(?P<upload>[0-9a-f]+))?"
    r"\.parquet",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a name: a file of the shard `shard`, or of the job `job`."""

    run_id: str
    attempt: int
    step: int
    shard: int | None
    job_id: str | None
    kind: str
    """`rollouts`, `scores` or `exact`."""
    digest: str


def shard_file_name(run_id: str, attempt: int, step: int, shard: int, digest: str) -> str:
    """Return a new name for a shard's tokens."""
    return f"{_folder(run_id, attempt, step)}/{shard:05d}-{_suffix(digest)}"


def score_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    """Return a new name for a shard of a job's scores."""
    return f"{_folder(run_id, attempt, step)}/scores/{job_id}-{_suffix(digest)}"


def exact_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    """Return a new name for a shard of a job's exact divergences."""
    return f"{_folder(run_id, attempt, step)}/exact/{job_id}-{_suffix(digest)}"


def parse_name(name: str) -> FileName | None:
    """Return the parts of a name; None if the service did not make it."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    shard = found["shard"]
    return FileName(
        run_id=found["run"],
        attempt=int(found["attempt"]),
        step=int(found["step"]),
        shard=None if shard is None else int(shard),
        job_id=found["job"],
        kind=found["kind"] or "rollouts",
        digest=found["digest"][:_DIGEST_DIGITS],
    )


def _folder(run_id: str, attempt: int, step: int) -> str:
    return f"{run_id}/{attempt:04d}/{step:09d}"


def _suffix(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')[:_DIGEST_DIGITS]}-{secrets.token_hex(8)}.parquet"


Made = TypeVar("Made")
_LOCK, _MARK = ".lock", ".publishing"


class TemporaryFiles:
    """The temporary files of this process below a folder that it shares with others. Thread-safe."""

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._changing = threading.Lock()
        self._own: Path | None = None
        self._lock = -1
        self._marks: Counter[str] = Counter()

    def new(self) -> Path:
        """Give a new, empty file."""
        with self._changing:
            descriptor, name = self._in_folder(lambda folder: tempfile.mkstemp(dir=folder))
        os.close(descriptor)
        return Path(name)

    def name(self) -> Path:
        """Give the path of a file that does not exist yet; `write_private` makes it."""
        with self._changing:
            return self._folder() / secrets.token_hex(8)

    @contextmanager
    def marked(self, name: str) -> Iterator[None]:
        """Mark a name of the store for the length of a `with` block; every process sees the mark.

        A name that is marked by several blocks at once stays so until the last of them ends.
        """
        mark = _mark_of(name)
        with self._changing:
            if not self._marks[mark]:
                self._in_folder(lambda folder: _link(folder / mark, folder.with_suffix(_LOCK)))
            self._marks[mark] += 1
        try:
            yield
        finally:
            with self._changing:
                self._marks[mark] -= 1
                if not self._marks[mark]:
                    del self._marks[mark]
                    if self._own is not None:
                        (self._own / mark).unlink(missing_ok=True)

    def is_marked(self, name: str) -> bool:
        """Return whether a process has marked the name, or had when it crashed and was not cleared yet."""
        return next(self._shared.glob(f"*/{_mark_of(name)}"), None) is not None

    def remove_abandoned(self) -> int:
        """Delete the files of processes that have ended; return their number."""
        removed = 0
        for lock in self._shared.glob(f"*{_LOCK}"):
            folder = lock.with_suffix("")
            descriptor = None if folder == self._own else _locked(lock)
            if descriptor is None:
                continue
            removed += sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)
        return removed

    def close(self) -> None:
        """Remove the folder of this process and release its lock; a later file makes another."""
        with self._changing:
            if self._own is None:
                return
            shutil.rmtree(self._own, ignore_errors=True)
            self._own.with_suffix(_LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._own = None

    def _folder(self) -> Path:
        if self._own is None:
            self._lock, self._own = self._make_own()
            self._own.mkdir(parents=True, exist_ok=True)
        return self._own

    def _in_folder(self, make: Callable[[Path], Made]) -> Made:
        """Make a file in the folder of this process."""
        folder = self._folder()
        try:
            return make(folder)
        except FileNotFoundError:
            # It may have been cleared by hand.
            folder.mkdir(parents=True, exist_ok=True)
            return make(folder)

    def _make_own(self) -> tuple[int, Path]:
        self._shared.mkdir(parents=True, exist_ok=True)
        while True:
            folder = self._shared / secrets.token_hex(8)
            lock = folder.with_suffix(_LOCK)
            descriptor = _locked(lock, create=True)
            # Another process may have removed the file between its creation and the lock.
            if descriptor is not None and lock.exists():
                return descriptor, folder


def write_private(path: Path, data: bytes | memoryview) -> None:
    """Write a file that only this user may read, as `TemporaryFiles.new` makes it; what was there is replaced.

    A decoder that died may have begun it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        # The folder of the process may have been cleared by hand.
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data).cast("B")
        while view.nbytes:
            view = view[file.write(view) :]


def _link(path: Path, existing: Path) -> None:
    """Make a file as another name of one that exists.

    Without a journal, ext4 searches long for a free inode where many were freed lately, as those of marks would be.
    """
    try:
        path.hardlink_to(existing)
    except OSError:  # a file system without links, or a folder that was cleared by hand
        path.touch()


def _mark_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + _MARK


def _locked(path: Path, *, create: bool = False) -> int | None:
    """Open and lock a file; return its descriptor, None if it is gone or another process holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class StoredFile(Protocol):
    """One file of the store; it may be sent to a decoder process.

    Reading raises FileNotFoundError if the file is missing, and other OSErrors if the store does not answer.
    """

    @property
    def name(self) -> str:
        """Its name in the store, with `/`."""

    def read_bytes(self) -> bytes:
        """Return the whole file."""

    def open(self) -> BinaryIO:
        """Open the file for reading parts of it: each read fetches its range only."""

    def exists(self) -> bool:
        """Return whether the file is in the store."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as the store lists it; `age_seconds` since it was published."""

    name: str
    size: int
    age_seconds: float


class TokenStore(ABC):
    """Files by name, relative to the store's folder or prefix, with `/`. Thread-safe.

    Every method that reaches the store raises OSError if it does not answer; the service answers that with 503 or 507.
    """

    def __init__(self, temporaries: TemporaryFiles) -> None:
        self._temporaries = temporaries

    @abstractmethod
    def publish(self, temporary: Path, name: str) -> None:
        """Give a temporary file its name, durably: once this returns a power cut loses none of it."""

    @abstractmethod
    def file(self, name: str) -> StoredFile:
        """Return the file of a name, which need not exist; raises ValueError for a name outside the store."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file if it exists."""

    @abstractmethod
    def list_files(self) -> Iterator[ListedFile]:
        """Yield every file of the store, sorted within a folder; temporary files are none of them."""

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the bytes of those of these files that exist."""

    @abstractmethod
    def check_exists(self) -> None:
        """Raise ConfigurationError unless the folder or the bucket is there."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise OSError unless a file can be written."""

    def temporary_file(self) -> Path:
        """Give a new, empty file on this machine, to be published or deleted."""
        return self._temporaries.new()

    def temporary_name(self) -> Path:
        """Give the path of a new temporary file that does not exist yet, for `write_private`."""
        return self._temporaries.name()

    def in_flight(self, name: str) -> AbstractContextManager[None]:
        """Mark a name from before it is published until its row is committed, so that no sweep takes the file."""
        return self._temporaries.marked(name)

    def is_in_flight(self, name: str) -> bool:
        """Return whether a process of this machine has marked the name."""
        return self._temporaries.is_marked(name)

    def remove_abandoned_temporaries(self) -> int:
        """Delete the temporary files of processes that have ended; return their number."""
        return self._temporaries.remove_abandoned()

    def close(self) -> None:
        """Remove the temporary files of this process."""
        self._temporaries.close()
