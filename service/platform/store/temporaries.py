"""Temporary files of the token store: a folder for each process, removed once its process has ended.

    temporary/<id>.lock                 locked while the process lives
    temporary/<id>/…                    its temporary files
    temporary/<id>/<name>.publishing    a link: the catalogue is about to name this file of the store

The lock ends with the process, however it ends, so a crash leaves nothing that the next process does not remove, and no
file of a request in flight is ever taken for one of a crash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

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
