"""One service for each SQLite file: two would both do each background job, and not hear of each other's changes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.engine import parse_database_url

# Of file systems that have no locks; a service on one starts all the same.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def only_service(database_url: str) -> Iterator[None]:
    """Hold a SQLite file for this service during a `with` block; PostgreSQL takes any number of services.

    The lock is the process's: it ends with it, however it ends, and its decoders do not inherit it. Commands that run
    beside a service take none. Raises ConfigurationError if another service holds the file.
    """
    url = parse_database_url(database_url)
    if url.get_backend_name() != "sqlite":
        yield
        return
    path = f"{url.database}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"the file {path} cannot be opened ({error.strerror}): give this user write access to it and its folder, "
            "or delete it, if another user made it and no service runs"
        ) from None
    try:
        _lock(descriptor, str(url.database))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, database: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace") or "unknown"
        raise ConfigurationError(
            f"another service (process {holder}) uses the database {database}: stop it first, give this one a database "
            "of its own with FORESHOCK_DATABASE_URL, or use PostgreSQL, which several services may share"
        ) from None
