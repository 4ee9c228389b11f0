"""Token files in a local folder: written aside, made durable, then renamed into place.

A file that no catalogue row names (a crash between the rename and the commit) is an orphan: nothing reads it. No
client string is ever part of a path; names are made of the server's run id, integers and the body's digest.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from foreshock.errors import ConfigurationError
from foreshock.kill_points import passed
from service.platform.store.temporaries import TemporaryFiles

_TEMPORARY = "temporary"


class TokenStore:
    """Files below one root; names are relative to it, with `/`."""

    def __init__(self, url: str) -> None:
        self.root = self.root_of(url)
        self._temporaries = TemporaryFiles(self.root / _TEMPORARY)

    @staticmethod
    def root_of(url: str) -> Path:
        """Return the folder that FORESHOCK_STORE_URL names; raises ConfigurationError if it names none."""
        if "://" in url and not url.startswith("file://"):
            raise ConfigurationError("FORESHOCK_STORE_URL must be a local folder, such as ./foreshock-data/tokens")
        return Path(url.removeprefix("file://")).absolute()

    def temporary_file(self) -> Path:
        """Give a new, empty file on the store's file system, so that a rename moves no bytes."""
        return self._temporaries.new()

    def publish(self, temporary: Path, name: str) -> None:
        """Sync a temporary file, give it its name, and sync its folders, so that a power cut loses none of it."""
        final = self.path_of(name)
        created = _make_folders(final.parent)
        # Synced before it is renamed: the name may be that of an equal file that a row names already.
        passed("store.file-written")
        _sync(temporary)
        passed("store.file-synced")
        temporary.replace(final)
        passed("store.file-renamed")
        for folder in {final.parent, *(folder.parent for folder in created)}:
            _sync(folder)

    def path_of(self, name: str) -> Path:
        """Return the path of a catalogue name; raises ValueError for a name outside the store."""
        path = (self.root / name).absolute()
        if ".." in path.parts or not path.is_relative_to(self.root):
            raise ValueError(f"{name!r} is not inside the token store")
        return path

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        self.path_of(name).unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise OSError unless a file can be written and renamed."""
        probe = self.temporary_file()
        try:
            probe.write_bytes(b"foreshock")
        finally:
            probe.unlink(missing_ok=True)

    def remove_abandoned_temporaries(self) -> int:
        """Delete the temporary files of processes that have ended; return their number."""
        return self._temporaries.remove_abandoned()

    def close(self) -> None:
        """Remove the temporary files of this process."""
        self._temporaries.close()


def shard_file_name(run_id: str, attempt: int, step: int, shard: int, digest: str) -> str:
    """Return a name for a shard's tokens; unique per upload, so that the loser of a race removes only its own file."""
    digits = digest.removeprefix("sha256:")[:16]
    return f"{run_id}/{attempt:04d}/{step:09d}/{shard:05d}-{digits}-{secrets.token_hex(8)}.parquet"


def score_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    """Return the name of a shard of a job's scores; equal bytes from two tries are one file."""
    return f"{run_id}/{attempt:04d}/{step:09d}/scores/{job_id}-{digest.removeprefix('sha256:')}.parquet"


def exact_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    """Return the name of a shard of a job's exact divergences; equal bytes from two tries are one file."""
    return f"{run_id}/{attempt:04d}/{step:09d}/exact/{job_id}-{digest.removeprefix('sha256:')}.parquet"


def _make_folders(folder: Path) -> list[Path]:
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
