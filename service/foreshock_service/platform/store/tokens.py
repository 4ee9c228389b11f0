"""The token store: immutable files that the catalogue in the database names, in a folder or an S3-compatible store.

A file is written to a temporary place, then published under its name as a whole or not at all. A file that no catalogue
row names (after a crash between publishing and the commit) is an orphan, which `removal.py` removes. Names contain no
client strings, only the server's ids, integers and the body's digest:

    <run>/<attempt>/<step>/<shard>-<digest>-<upload>.parquet           rollouts of a shard
    <run>/<attempt>/<step>/scores/<job>-<digest>-<upload>.parquet      scores of a job

`<upload>` is random, so that no two uploads share a file: the loser of a race removes only its own file, and an orphan
stays an orphan until it is removed.
"""

import errno
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from foreshock.errors import ConfigurationError

if TYPE_CHECKING:
    # Decoder processes import this module, but no settings, no database and, with a folder, no S3 client.
    from foreshock_service.platform.settings import Settings
    from foreshock_service.platform.store.objects import ObjectFile, ObjectTokenStore

StoredFile: TypeAlias = "LocalFile | ObjectFile"
TokenStore: TypeAlias = "LocalTokenStore | ObjectTokenStore"

_DIGEST_DIGITS = 16
_NAME = re.compile(
    r"(?P<run>[\w-]+)/(?P<attempt>\d{4,})/(?P<step>\d{9,})/"
    r"(?:\d{5,}|scores/(?P<job>[\w]+))-[0-9a-f]+-[0-9a-f]+\.parquet",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a name. A file belongs to the job `job_id`, or to a shard."""

    run_id: str
    attempt: int
    step: int
    job_id: str | None


def shard_file_name(run_id: str, attempt: int, step: int, shard: int, digest: str) -> str:
    return _new_name(run_id, attempt, step, f"{shard:05d}", digest)


def score_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    return _new_name(run_id, attempt, step, f"scores/{job_id}", digest)


def _new_name(run_id: str, attempt: int, step: int, of: str, digest: str) -> str:
    digits = digest.removeprefix("sha256:")[:_DIGEST_DIGITS]
    return f"{run_id}/{attempt:04d}/{step:09d}/{of}-{digits}-{secrets.token_hex(8)}.parquet"


def parse_name(name: str) -> FileName | None:
    """Return the parts of a name; None if the service did not make it."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return FileName(found["run"], int(found["attempt"]), int(found["step"]), found["job"])


_TEMPORARY_SECONDS = 3600.0
"""An older temporary file was left by a crash: no upload pauses for so long."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as the store lists it; `age_seconds` since it was published."""

    name: str
    size: int
    age_seconds: float


class TemporaryFiles:
    """The files of uploads under way, in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._temporary_folder = folder

    def temporary_file(self) -> Path:
        """Return a new, empty file on this machine that only this user may read. The caller publishes or deletes it."""
        self._temporary_folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._temporary_folder)
        os.close(descriptor)
        return Path(name)

    def remove_old_temporaries(self) -> int:
        """Delete temporary files that a crash left; return their number."""
        removed, written_before = 0, time.time() - _TEMPORARY_SECONDS
        for path in self._temporary_folder.glob("*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < written_before:
                    path.unlink()
                    removed += 1
        return removed


_TEMPORARY = "temporary"
# A concurrent removal may delete the folder, which is then made again.
_PUBLISH_TRIES = 10


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of a local folder; `name` is its name in the store, with `/`. It may be sent to a decoder process.

    Reading raises FileNotFoundError if the file is missing, and other OSErrors if the store does not answer.
    """

    name: str
    path: Path

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()

    def open(self) -> BinaryIO:
        return self.path.open("rb")

    def exists(self) -> bool:
        return self.path.exists()


class LocalTokenStore(TemporaryFiles):
    """Files below one folder by name, relative to it, with `/`. Thread-safe.

    Every method that reaches the store raises OSError if it does not answer; the service answers that with 503 or 507.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        super().__init__(self.root / _TEMPORARY)

    def publish(self, temporary: Path, name: str) -> None:
        """Give a temporary file its name, durably: after this returns, a power cut loses nothing."""
        # Synced before the rename, because the name may belong to an equal file that a row names already.
        _sync(temporary)
        final = self.path_of(name)
        for remaining in reversed(range(_PUBLISH_TRIES)):
            try:
                created = [folder for folder in (final.parent, *final.parent.parents) if not folder.exists()]
                final.parent.mkdir(parents=True, exist_ok=True)
                temporary.replace(final)
                for folder in {final.parent, *(folder.parent for folder in created)}:
                    _sync(folder)
                return
            except FileNotFoundError:
                if not temporary.exists():
                    # The sweep of orphans removed the new file at once, with its folder.
                    raise OSError(errno.EIO, f"removed before its row was committed: {name}") from None
                if not remaining:
                    raise

    def path_of(self, name: str) -> Path:
        """Return the path of a name; raises ValueError for a name outside the store."""
        if os.path.isabs(name) or ".." in name.split(os.sep):
            raise ValueError(f"{name!r} is not inside the token store")
        return self.root / name

    def file(self, name: str) -> LocalFile:
        """Return the file of a name, which need not exist; raises ValueError for a name outside the store."""
        return LocalFile(name, self.path_of(name))

    def remove(self, name: str) -> None:
        """Delete a file if it exists, and the folders that it leaves empty."""
        path = self.path_of(name)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the first folder that is not empty, or gone already
            for folder in path.relative_to(self.root).parents[:-1]:
                (self.root / folder).rmdir()

    def list_files(self) -> Iterator[ListedFile]:
        """Yield every file of the store except temporary ones, sorted within a folder."""
        yield from self._list("", time.time())

    def check_exists(self) -> None:
        """Raise ConfigurationError unless the folder is there."""
        if not self.root.is_dir():
            raise ConfigurationError(f"there is no token store {self.root}: FORESHOCK_STORE_URL must be the service's")

    def check_writable(self) -> None:
        """Raise OSError unless a file can be written."""
        probe = self.temporary_file()
        try:
            probe.write_bytes(b"foreshock")
        finally:
            probe.unlink(missing_ok=True)

    def _list(self, folder: str, now: float) -> Iterator[ListedFile]:
        try:
            with os.scandir(self.root / folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:  # removed meanwhile, or nothing was stored yet
            return
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if name != _TEMPORARY:
                    yield from self._list(name, now)
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield ListedFile(name, status.st_size, now - status.st_mtime)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_store(settings: "Settings") -> "TokenStore":
    """Return the store of FORESHOCK_STORE_URL; raises ConfigurationError if that is neither a folder nor `s3://…`."""
    if settings.store_is_folder:
        return LocalTokenStore(settings.store_folder)
    # Imported only here: the S3 client takes a tenth of a second to import.
    from foreshock_service.platform.store.objects import ObjectLocation, ObjectTokenStore

    bucket, prefix = ObjectLocation.of_url(settings.store_url)
    names = ("access_key_id", "secret_access_key")
    given = {name: getattr(settings, f"store_{name}") for name in names}
    location = ObjectLocation(
        bucket=bucket,
        prefix=prefix,
        endpoint=settings.store_endpoint,
        timeout_seconds=settings.store_timeout_seconds,
        **{name: secret.get_secret_value() for name, secret in given.items() if secret is not None},
    )
    return ObjectTokenStore(location, settings.store_folder)
