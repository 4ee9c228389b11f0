"""Files and folders of this user that no one else may write: the files in a spool are sent with the API key."""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from foreshock.errors import SpoolError

_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_temporary_folder(prefix: str) -> Path:
    """Return a folder below the common temporary folder: `<prefix><uid>` if it is this user's, or is missing.

    If another user made it first: this user's folder with that name and a random ending, else a new such name.
    """
    temporary = _common_temporary_folder()
    name = f"{prefix}{os.geteuid()}"
    with contextlib.suppress(OSError):
        if not os.path.lexists(temporary / name) or is_private_folder(temporary / name):
            return temporary / name
        for folder in sorted(temporary.glob(f"{name}-*")):
            if is_private_folder(folder):
                return folder
    return temporary / f"{name}-{secrets.token_hex(16)}"


def _common_temporary_folder() -> Path:
    """Return the temporary folder; `gettempdir` raises if the disk is full."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def make_private(directory: Path) -> None:
    """Make a folder and its parents (`mkdir(parents=True)` would not make those private). Raises SpoolError."""
    for path in reversed((directory, *directory.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    require_private(directory)


def require_private(directory: Path) -> None:
    """Remove the rights of other users on a folder; raise SpoolError if it belongs to another user.

    Below the common temporary folder each parent is checked too, since anyone may have made it.
    """
    user = os.geteuid()
    temporary = _common_temporary_folder()
    for path in (directory, *directory.parents):
        if path != directory and temporary not in path.parents:
            break
        found = path.lstat()
        # Root may use a folder of another user, such as a mounted volume.
        if found.st_uid not in (user, 0) and user != 0:
            raise SpoolError(
                f"{path} belongs to another user (uid {found.st_uid}): its files would be sent with your API key; "
                "set FORESHOCK_SPOOL_DIRECTORY to a folder of your own"
            )
    found = directory.stat()
    if found.st_mode & _OF_OTHERS and found.st_uid == user:
        directory.chmod(stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)


def is_private_folder(folder: Path) -> bool:
    """Return whether the folder is this user's, no link, and no one else may write it."""
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & _WRITABLE_BY_OTHERS


def open_own(path: Path) -> BinaryIO:
    """Open a regular file of this user for reading. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    file = os.fdopen(handle, "rb")
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"{path} is not a file of this user")
    return file


def read_own(path: Path) -> bytes:
    """Return the content of a regular file of this user. Raises OSError."""
    with open_own(path) as file:
        return file.read()


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file under a temporary name and rename it: it is there whole, or not. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a loss of power. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def as_spool_error(directory: Path) -> Iterator[None]:
    """Raise an OSError of the block as SpoolError, which names the spool directory."""
    try:
        yield
    except SpoolError:
        raise
    except OSError as error:
        raise SpoolError(f"the spool directory {directory} cannot be used: {error.strerror or error}") from error
