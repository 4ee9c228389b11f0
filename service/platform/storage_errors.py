"""Failures of storage as problems: a full disk, a folder that cannot be written, a database that does not answer.

None of them is the client's fault and all of them end, so each answer says when to send the same bytes again.
"""

from __future__ import annotations

import errno
import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from foreshock_service.platform.problem import ProblemError, problem_response

_logger = logging.getLogger(__name__)
_RETRY_AFTER = {"Retry-After": "30"}
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNAVAILABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_SQLITE_FULL = "database or disk is full"


class StorageFull(ProblemError):
    """Full: the token store or the database has no room."""

    status = 507
    problem_type = "storage-full"


class StorageUnavailable(ProblemError):
    """Storage that cannot be written or read now: its folder, its disk or a limit of the system."""

    status = 503
    problem_type = "storage-unavailable"


class DatabaseUnavailable(ProblemError):
    """A database that does not answer, or has no free connection."""

    status = 503
    problem_type = "database-unavailable"


def install_storage_handlers(app: FastAPI) -> None:
    """Answer failures of storage with problems; other errors of these classes stay unexpected."""
    app.add_exception_handler(OSError, _storage_failed)
    for error in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(error, _database_failed)


def storage_problem(error: OSError) -> ProblemError | None:
    """Return the problem of an error of the file system; None if it is no failure of storage."""
    if error.errno in _FULL:
        return StorageFull("the token store is full: nothing was stored; free space or extend it", headers=_RETRY_AFTER)
    if error.errno in _UNAVAILABLE:
        return StorageUnavailable(
            "the token store cannot be used: nothing was stored; see the service's log", headers=_RETRY_AFTER
        )
    return None


def database_problem(error: Exception) -> ProblemError:
    """Return the problem of an error of the database."""
    if _SQLITE_FULL in str(error):
        return StorageFull("the database is full: nothing was stored; free space or extend it", headers=_RETRY_AFTER)
    return DatabaseUnavailable(
        "the database does not answer: nothing was stored; see the service's log", headers=_RETRY_AFTER
    )


def _storage_failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OSError)
    problem = storage_problem(error)
    if problem is None:
        raise error
    return _answer(request, error, problem)


def _database_failed(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, error, database_problem(error))


def _answer(request: Request, error: Exception, problem: ProblemError) -> JSONResponse:
    # The database's own message: SQLAlchemy's also holds the parameters of the statement.
    _logger.error("%s %s: %s", request.method, request.url.path, getattr(error, "orig", error))
    return problem_response(problem)
