"""The token store: immutable files that the catalogue in the database names, in a folder or an S3-compatible store.

A file is written aside, then published under its name as a whole or not at all. A file that no catalogue row names (a
crash between publishing and the commit) is an orphan, which `orphans.py` removes. No client string is ever part of a
name; names are made in `names.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from foreshock_service.platform.store.temporaries import TemporaryFiles


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
