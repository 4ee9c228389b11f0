"""Errors as RFC 9457 problems: the base class every error of the service has, and the handlers that render them.

An error carries its own status: `class RunNotFound(ProblemError): status = 404`. The framework's own 404, 405 and 422,
the library's `InvalidRolloutsError` and `LimitExceededError`, and failures of storage have the same shape
(`request_guards.py` adds the 500). A full disk or a database that does not answer is temporary and not the client's
fault: those answers say when to send the same bytes again.
"""

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Self

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy import exc
from starlette.exceptions import HTTPException

from foreshock.errors import PROBLEM_TYPE_PREFIX, InvalidRolloutsError, LimitExceededError, RolloutsError
from foreshock_service.platform.logs import current_request_id

PROBLEM_MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER = {"Retry-After": "30"}
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNAVAILABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
DATABASE_ERRORS = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
"""Errors of a database that does not answer, or whose pool has no free connection."""

_logger = logging.getLogger(__name__)
# Bounds of one problem document: a request may have a fault in each of its values, and a parameter name of 60 kB.
_MOST_ITEMS, _MOST_CHARACTERS, _MOST_DETAIL = 20, 300, 4000


def _clipped(text: str, most: int = _MOST_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class ProblemItem(BaseModel):
    """One of several faults of a request: its location and a message."""

    location: Annotated[str, AfterValidator(_clipped)] = Field(description="such as `query.step` or `body.key`")
    message: Annotated[str, AfterValidator(_clipped)]


class ProblemDocument(BaseModel):
    """The body of every error (RFC 9457, `application/problem+json`)."""

    type: str = Field(description="`urn:foreshock:problem:…`; stable, one for each kind of error")
    title: str
    status: int
    detail: str
    row: int | None = Field(default=None, description="row of the uploaded table that is wrong, from 0")
    column: str | None = Field(default=None, description="column of the uploaded table that is wrong")
    errors: list[ProblemItem] | None = None
    request_id: str | None = Field(default=None, description="as in the header X-Request-Id and in the service's log")


class ProblemError(Exception):
    """Base of the service's errors: `class RunNotFound(ProblemError, status=404, problem_type="run-not-found")`.

    A type is part of the API: it stays when the class is renamed, and no two classes have the same.
    """

    status: ClassVar[int]
    problem_type: ClassVar[str]

    def __init_subclass__(cls, *, status: int, problem_type: str) -> None:
        """Take the status and the type from the class statement; Python refuses a class without them."""
        cls.status, cls.problem_type = status, problem_type

    def __init__(
        self,
        detail: str,
        *,
        row: int | None = None,
        column: str | None = None,
        errors: Sequence[ProblemItem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = _clipped(detail, _MOST_DETAIL)
        self.row = row
        self.column = None if column is None else _clipped(column)
        self.errors = list(errors[:_MOST_ITEMS])
        self.headers = dict(headers or {})

    def document(self) -> ProblemDocument:
        return ProblemDocument(
            type=PROBLEM_TYPE_PREFIX + self.problem_type,
            title=self.problem_type.replace("-", " ").capitalize(),
            status=self.status,
            detail=self.detail,
            row=self.row,
            column=self.column,
            errors=self.errors or None,
            request_id=current_request_id(),
        )


class InvalidRequest(ProblemError, status=422, problem_type="invalid-request"):
    """A path, query or body that does not fit the contract."""

    @classmethod
    def of_items(cls, items: Sequence[ProblemItem], count: int) -> Self:
        """Return the error of `count` faults. `items` are the first of them; up to twenty are shown."""
        shown = items[:_MOST_ITEMS]
        detail = "; ".join(f"{item.location}: {item.message}" for item in shown)
        more = f"; and {count - len(shown):,} more" if count > len(shown) else ""
        return cls((detail or "the request is not valid")[: _MOST_DETAIL - len(more)] + more, errors=shown)


class BadRequest(ProblemError, status=400, problem_type="bad-request"):
    """A JSON body that is not UTF-8, is nested too deep or has an integer of thousands of digits."""


class InvalidRollouts(ProblemError, status=422, problem_type="invalid-rollouts"):
    """An uploaded table that breaks the rollout schema; `row` and `column` locate the fault."""


class LimitExceeded(ProblemError, status=413, problem_type="limit-exceeded"):
    """An upload beyond a configured cap; the detail names the cap."""


class RequestTimeout(ProblemError, status=408, problem_type="request-timeout"):
    """A request whose body stopped coming."""


class UnsupportedMediaType(ProblemError, status=415, problem_type="unsupported-media-type"):
    """A body with a Content-Encoding, or of a content type that the endpoint does not accept."""


class NotAcceptable(ProblemError, status=406, problem_type="not-acceptable"):
    """An Accept header without an available media type."""


class StorageFull(ProblemError, status=507, problem_type="storage-full"):
    """Full: the token store or the database has no room."""


class StorageUnavailable(ProblemError, status=503, problem_type="storage-unavailable"):
    """Storage that cannot be written or read now: its folder, its disk or a limit of the system."""


class DatabaseUnavailable(ProblemError, status=503, problem_type="database-unavailable"):
    """A database that does not answer, or has no free connection."""


class BodyRefused(HTTPException):
    """A problem found while a body is read. An HTTPException, because FastAPI turns other exceptions into a 400."""

    def __init__(self, problem: ProblemError) -> None:
        super().__init__(problem.status, problem.detail, headers=problem.headers or None)
        self.problem = problem


class InternalError(ProblemError, status=500, problem_type="internal"):
    """A fault of the service itself; its cause is in the service's log only."""


def problem_response(error: ProblemError) -> JSONResponse:
    return _response(error.document(), error.headers or None)


def _response(document: ProblemDocument, headers: Mapping[str, str] | None) -> JSONResponse:
    content: dict[str, Any] = document.model_dump(exclude_none=True)
    return JSONResponse(content, document.status, headers=headers, media_type=PROBLEM_MEDIA_TYPE)


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app`, the framework's own included, a problem document."""
    of_library = (InvalidRolloutsError, LimitExceededError)
    for kind in (ProblemError, RequestValidationError, HTTPException, *of_library, OSError, *DATABASE_ERRORS):
        app.add_exception_handler(kind, answer_error)


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Return the answer to an error; raises the error if it is a fault of the service itself."""
    found = problem_of(request, error)
    if found is not None:
        return problem_response(found)
    if not isinstance(error, HTTPException):
        raise error
    title = HTTPStatus(error.status_code).phrase
    document = ProblemDocument(
        type=PROBLEM_TYPE_PREFIX + title.lower().replace(" ", "-"),
        title=title,
        status=error.status_code,
        detail=str(error.detail),
        request_id=current_request_id(),
    )
    return _response(document, error.headers)


def problem_of(request: Request, error: Exception) -> ProblemError | None:
    """Return the problem of an error, and log a failure of storage or of the database; None: it has none."""
    match error:
        case ProblemError():
            return error
        case BodyRefused():
            return error.problem
        case RequestValidationError():
            return _invalid_request(request, error)
        case InvalidRolloutsError():
            return InvalidRollouts(str(error), row=error.row, column=error.column)
        case LimitExceededError():
            return LimitExceeded(str(error))
        case HTTPException():
            # FastAPI's own message says only that there was an error in the body.
            fault = _fault_of_json(error.__cause__)
            return None if fault is None else BadRequest(fault)
        case OSError():
            found = storage_problem(error)
        case _:
            found = database_problem(error) if isinstance(error, DATABASE_ERRORS) else None
    if found is not None:
        # The database's own message: SQLAlchemy's also holds the parameters of the statement.
        _logger.error("%s %s: %s", request.method, request.url.path, getattr(error, "orig", error))
    return found


def document_problems(app: FastAPI) -> None:
    """Declare the problem document as the error of every operation of the API, in place of the framework's 422."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schema = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs"), "ProblemDocument": schema}
        content = {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "Any error", "content": content}
        app.openapi_schema = document
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def storage_problem(error: OSError) -> ProblemError | None:
    """Return the problem for an error of the file system; None if the error is not a failure of storage."""
    if error.errno in _FULL:
        return StorageFull("the token store is full: nothing was stored; free space or extend it", headers=_RETRY_AFTER)
    if error.errno in _UNAVAILABLE:
        return StorageUnavailable(
            "the token store cannot be used: nothing was stored; see the service's log", headers=_RETRY_AFTER
        )
    return None


def database_problem(error: Exception) -> ProblemError:
    if "database or disk is full" in str(error):
        return StorageFull("the database is full: nothing was stored; free space or extend it", headers=_RETRY_AFTER)
    if isinstance(error, exc.TimeoutError):
        return DatabaseUnavailable(
            "every connection to the database was in use for too long: nothing was stored; try again, or raise "
            "FORESHOCK_DATABASE_CONNECTIONS",
            headers=_RETRY_AFTER,
        )
    return DatabaseUnavailable(
        "the database does not answer: nothing was stored; see the service's log", headers=_RETRY_AFTER
    )


def _invalid_request(request: Request, error: RequestValidationError) -> ProblemError:
    faults = error.errors()
    if isinstance(error.body, bytes) and any(fault["loc"] == ("body",) for fault in faults):
        # FastAPI leaves a body of another media type as bytes. By default curl sends a form.
        sent = request.headers.get("content-type", "").partition(";")[0].strip()[:100] or "a body without a type"
        return UnsupportedMediaType(f"send JSON with Content-Type: application/json, not {sent}")
    return InvalidRequest.of_items([_item(fault, error.body) for fault in faults[:_MOST_ITEMS]], len(faults))


def _item(fault: Mapping[str, Any], body: object) -> ProblemItem:
    if fault["type"] == "json_invalid" and isinstance(body, str):
        position, reason = int(fault["loc"][1]), fault["ctx"]["error"]
        line, column = body.count("\n", 0, position) + 1, position - body.rfind("\n", 0, position)
        end = ", the end of the body" if position >= len(body) else ""
        return ProblemItem(location="body", message=f"not valid JSON at line {line}, column {column}{end}: {reason}")
    return ProblemItem(location=".".join(str(part) for part in fault["loc"]), message=str(fault["msg"]))


def _fault_of_json(cause: BaseException | None) -> str | None:
    """Return the fault of a JSON body whose parsing raised `cause`; None if the cause is something else."""
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8: byte {cause.start:,} cannot be read; send JSON in UTF-8"
    if isinstance(cause, RecursionError):
        return "the arrays and objects of the body are nested too deep; no call takes more than 16 levels"
    if isinstance(cause, ValueError):
        return "the body has an integer with more digits than can be read; send a number that fits its field"
    return None


class TokensGone(ProblemError, status=410, problem_type="tokens-gone"):
    """Gone: a token file that the catalogue names is not in the store."""


class TokensPurged(ProblemError, status=410, problem_type="tokens-purged"):
    """Purged: retention removed the tokens; measurements and rollout summaries stay."""


class TokensDamaged(ProblemError, status=500, problem_type="tokens-damaged"):
    """Damaged: a token file does not hold what was written; its checksums or its layout are wrong."""


@contextmanager
def present_file(what: str) -> Iterator[None]:
    """Raise TokensGone if a file of the store is missing. For a block whose other errors may come from an upload."""
    try:
        yield
    except FileNotFoundError as error:
        raise TokensGone(
            f"the token file of {what} is not in the store: sending its bytes again restores it, or a backup"
        ) from error


@contextmanager
def stored_file(what: str) -> Iterator[None]:
    """Raise TokensGone or TokensDamaged for a file of the store that cannot be read; `what` names its owner."""
    try:
        with present_file(what):
            yield
    except RolloutsError as error:
        raise TokensDamaged(
            f"the token file of {what} is damaged: sending its bytes again restores it, or a backup ({error.fault})"
        ) from error
