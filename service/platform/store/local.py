"""Token files in a local folder: written aside, made durable, then renamed into place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from foreshock.errors import ConfigurationError
from foreshock_service.platform.store.tokens import ListedFile, TokenStore

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings

_TEMPORARY = "temporary"
# A folder that a removal prunes at the same moment is made again.
_PUBLISH_TRIES = 10


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of a local folder."""

    name: str
    path: Path

    def read_bytes(self) -> bytes:
        """Return the whole file."""
        return self.path.read_bytes()

    def open(self) -> BinaryIO:
        """Open the file."""
        return self.path.open("rb")

    def exists(self) -> bool:
        """Return whether the file is there."""
        return self.path.exists()


class LocalTokenStore(TokenStore):
    """Files below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        super().__init__(self.root / _TEMPORARY)

    def publish(self, temporary: Path, name: str) -> None:
        """Sync a temporary file, give it its name, and sync its folders."""
        # Synced before it is renamed: the name may be that of an equal file that a row names already.
        _sync(temporary)
        final = self.path_of(name)
        for remaining in reversed(range(_PUBLISH_TRIES)):
            try:
                created = _make_folders(final.parent)
                temporary.replace(final)
                for folder in {final.parent, *(folder.parent for folder in created)}:
                    _sync(folder)
                return
            except FileNotFoundError:
                if not remaining or not temporary.exists():
                    raise

    def path_of(self, name: str) -> Path:
        """Return the path of a name; raises ValueError for a name outside the store."""
        if os.path.isabs(name) or ".." in name.split(os.sep):
            raise ValueError(f"{name!r} is not inside the token store")
        return self.root / name

    def file(self, name: str) -> LocalFile:
        """Return the file of a name; raises ValueError for a name outside the store."""
        return LocalFile(name, self.path_of(name))

    def remove(self, name: str) -> None:
        """Delete a file if it exists, and the folders that it leaves empty."""
        path = self.path_of(name)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the first folder that is not empty, or gone already
            for folder in path.relative_to(self.root).parents[:-1]:
                (self.root / folder).rmdir()

    def list_files(self) -> Iterator[ListedFile]:
        """Yield every file below the folder but temporary ones."""
        yield from self._list("", time.time())

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the size in bytes of each of these files that exists, by name."""
        found = {}
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = self.path_of(name).stat().st_size
        return found

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


def _make_folders(folder: Path) -> list[Path]:
    """Make the folder and those above it; return the ones that did not exist."""
    with suppress(FileNotFoundError):
        # Usually those of the run and of the attempt are there.
        try:
            folder.mkdir()
        except FileExistsError:
            return []
        return [folder]
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_store(settings: Settings) -> TokenStore:
    """Return the store of FORESHOCK_STORE_URL; raises ConfigurationError if that is neither a folder nor `s3://…`."""
    if settings.store_is_folder:
        return LocalTokenStore(settings.store_folder)
    # Its client takes a tenth of a second to import.
    from foreshock_service.platform.store.objects import ObjectLocation, ObjectTokenStore

    bucket, prefix = ObjectLocation.of_url(settings.store_url)
    names = ("access_key_id", "secret_access_key", "session_token")
    secrets = {name: getattr(settings, f"store_{name}") for name in names}
    location = ObjectLocation(
        bucket=bucket,
        prefix=prefix,
        endpoint=settings.store_endpoint,
        region=settings.store_region,
        timeout_seconds=settings.store_timeout_seconds,
        **{name: secret.get_secret_value() for name, secret in secrets.items() if secret is not None},
    )
    return ObjectTokenStore(location, settings.store_folder)
