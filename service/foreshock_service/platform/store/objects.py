"""Token files in an S3-compatible store: one object per file, written and read whole.

Bodies are received and decoded in a folder of this machine; only finished files are uploaded. An object appears whole
or not at all, even if it is uploaded in parts.
"""

from __future__ import annotations

import errno
import io
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from foreshock.errors import ConfigurationError
from foreshock_service.platform.store.tokens import ListedFile, TemporaryFiles

_TEMPORARY = "temporary/"
_PART_BYTES = 8 << 20
_LISTED_AT_ONCE = 1000
# The S3 client's own retries are short: they cover a connection that the server closed between two requests. An upload
# that fails is answered with 503, and the trainer's client sends it again.
_RETRIES, _RETRY_SECONDS = 2, 5.0
# Error codes of S3-compatible servers for a full store or an exhausted quota.
_FULL = ("507 Insufficient Storage", "QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge")
_NO_BUCKET = "NoSuchBucket"
_OPTIONS = ("endpoint", "access_key_id", "secret_access_key")


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """Where objects are: the bucket and prefix, the endpoint (empty: AWS) and the credentials (empty: ambient).

    The region and a session token are those of the environment (AWS_REGION, AWS_SESSION_TOKEN).
    """

    bucket: str
    prefix: str
    endpoint: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    timeout_seconds: float = 30.0

    @staticmethod
    def of_url(url: str) -> tuple[str, str]:
        """Return bucket and prefix of `s3://bucket/prefix`; raises ConfigurationError."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigurationError(
                "FORESHOCK_STORE_URL must be s3://bucket/prefix, without credentials: those are "
                "FORESHOCK_STORE_ACCESS_KEY_ID and FORESHOCK_STORE_SECRET_ACCESS_KEY"
            )
        return parts.netloc, parts.path.strip("/")


@lru_cache(maxsize=8)
def _client(location: ObjectLocation) -> S3Store:
    """Return the client of a location, one per process: it keeps connections open."""
    given = {name: getattr(location, name) for name in _OPTIONS}
    return S3Store(
        location.bucket,
        prefix=location.prefix or None,
        client_options={
            "allow_http": location.endpoint.startswith("http://"),
            "timeout": timedelta(seconds=location.timeout_seconds),
            "connect_timeout": timedelta(seconds=min(5.0, location.timeout_seconds)),
        },
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
        # Options that are not set are left out: the client takes them from its environment.
        **{name: value for name, value in given.items() if value},
    )


@contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    """Raise FileNotFoundError for a missing object and another OSError for a store that refuses or does not answer."""
    try:
        yield
    except FileNotFoundError as error:
        if _NO_BUCKET in str(error):
            raise OSError(errno.EIO, f"the bucket of the token store does not exist ({_first_line(error)})") from None
        raise FileNotFoundError(errno.ENOENT, "the token store has no such object", name) from None
    except BaseError as error:
        text = str(error)
        code = errno.ENOSPC if any(mark in text for mark in _FULL) else errno.EIO
        # Not chained: the messages of the client are long, and name addresses.
        raise OSError(code, f"the token store refused or did not answer: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """An object of the store; its methods are those of LocalFile."""

    name: str
    location: ObjectLocation

    def read_bytes(self) -> bytes:
        with _as_os_errors(self.name):
            return bytes(obstore.get(_client(self.location), self.name).bytes())

    def open(self) -> BinaryIO:
        """Read the object by one request: a request for each part of it that is read would take longer."""
        return io.BytesIO(self.read_bytes())

    def exists(self) -> bool:
        try:
            with _as_os_errors(self.name):
                obstore.head(_client(self.location), self.name)
        except FileNotFoundError:
            return False
        return True


class ObjectTokenStore(TemporaryFiles):
    """Files as the objects of a bucket below a prefix; its methods are those of LocalTokenStore."""

    def __init__(self, location: ObjectLocation, temporary_folder: Path) -> None:
        super().__init__(temporary_folder.absolute())
        self.location = location

    def publish(self, temporary: Path, name: str) -> None:
        """Upload a temporary file, in parts if it is large, and delete it."""
        with _as_os_errors(name):
            large = temporary.stat().st_size > _PART_BYTES
            obstore.put(_client(self.location), name, temporary, use_multipart=large, chunk_size=_PART_BYTES)
        temporary.unlink()

    def file(self, name: str) -> ObjectFile:
        """Return the object of a name; raises ValueError for a name outside the prefix."""
        if name.startswith("/") or not all(part not in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"{name!r} is not inside the token store")
        return ObjectFile(name, self.location)

    def remove(self, name: str) -> None:
        self.file(name)
        try:
            with _as_os_errors(name):
                obstore.delete(_client(self.location), name)
        except FileNotFoundError:
            return

    def list_files(self) -> Iterator[ListedFile]:
        """Yield every object below the prefix except those of readiness checks."""
        now = datetime.now(UTC)
        for found in self._list():
            if not found["path"].startswith(_TEMPORARY):
                age = (now - found["last_modified"]).total_seconds()
                yield ListedFile(found["path"], found["size"], age)

    def check_exists(self) -> None:
        try:
            next(self._list(), None)
        except OSError as error:
            raise ConfigurationError(f"the token store s3://{self.location.bucket} cannot be read: {error}") from None

    def check_writable(self) -> None:
        with _as_os_errors(_TEMPORARY):
            obstore.put(_client(self.location), f"{_TEMPORARY}readiness-{socket.gethostname()}", b"foreshock")

    def _list(self) -> Iterator[obstore.ObjectMeta]:
        with _as_os_errors(""):
            for batch in obstore.list(_client(self.location), chunk_size=_LISTED_AT_ONCE):
                yield from batch
