"""Errors as RFC 9457 problems: the base class every error of the service has, and the handlers that render them.

An error carries its own status: `class RunNotFound(ProblemError): status = 404`. The framework's own 404, 405 and 422,
and the library's `InvalidRolloutsError` and `LimitExceededError` come out in the same shape (`guards.py` adds the 500).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.problem_types import PROBLEM_TYPE_PREFIX
from foreshock_service.platform.json_bodies import fault_of, syntax_fault
from foreshock_service.platform.logs.request_ids import current_request_id
from foreshock_service.platform.media_types import media_type_of

PROBLEM_MEDIA_TYPE = "application/problem+json"


class ProblemItem(BaseModel):
    """One of several faults of a request: its location and a message."""

    location: str = Field(description="such as `query.step` or `body.key`")
    message: str


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
    """Base of the service's errors. Subclasses set `status` and `problem_type`.

    A type is part of the API: it stays when the class is renamed, and no two classes have the same.
    """

    status: ClassVar[int] = 500
    problem_type: ClassVar[str]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse a class without a type of its own."""
        super().__init_subclass__(**keywords)
        if "problem_type" not in cls.__dict__:
            raise TypeError(f'{cls.__name__} needs a `problem_type` of its own, such as "run-not-found"')

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
        self.detail = detail
        self.row = row
        self.column = column
        self.errors = list(errors)
        self.headers = dict(headers or {})

    def document(self) -> ProblemDocument:
        """Return the problem document that is sent."""
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


class InvalidRequest(ProblemError):
    """A path, query or body that does not fit the contract."""

    status = 422
    problem_type = "invalid-request"


class BadRequest(ProblemError):
    """A request that is no HTTP, or a JSON body that is not UTF-8, is nested too deep or has a too long integer."""

    status = 400
    problem_type = "bad-request"


class InvalidRollouts(ProblemError):
    """An uploaded table that breaks the rollout schema; `row` and `column` locate the fault."""

    status = 422
    problem_type = "invalid-rollouts"


class LimitExceeded(ProblemError):
    """An upload beyond a configured cap; the detail names the cap."""

    status = 413
    problem_type = "limit-exceeded"


class RequestTimeout(ProblemError):
    """A request whose headers or body stopped coming, or come too slowly."""

    status = 408
    problem_type = "request-timeout"


class HeadersTooLarge(ProblemError):
    """A request whose target, headers or trailers are beyond the cap; its connection is closed."""

    status = 431
    problem_type = "headers-too-large"


class UnsupportedMediaType(ProblemError):
    """A body whose content type the endpoint does not accept."""

    status = 415
    problem_type = "unsupported-media-type"


class NotAcceptable(ProblemError):
    """An Accept header without an available media type."""

    status = 406
    problem_type = "not-acceptable"


class BodyRefused(HTTPException):
    """A problem that is found while a body is read: FastAPI passes an HTTPException through, others become a 400."""

    def __init__(self, problem: ProblemError) -> None:
        super().__init__(problem.status, problem.detail, headers=problem.headers or None)
        self.problem = problem


class InternalError(ProblemError):
    """A fault of the service itself; its cause is in the service's log only."""

    status = 500
    problem_type = "internal"


def problem_response(error: ProblemError) -> JSONResponse:
    """Return the error as an `application/problem+json` response."""
    return JSONResponse(
        error.document().model_dump(exclude_none=True),
        status_code=error.status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers=error.headers or None,
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app`, the framework's own included, a problem document."""
    app.add_exception_handler(ProblemError, _own_error)
    app.add_exception_handler(RequestValidationError, _request_invalid)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(InvalidRolloutsError, _library_error)
    app.add_exception_handler(LimitExceededError, _library_error)


def _own_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    return problem_response(error)


def _request_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes) and any(fault["loc"] == ("body",) for fault in error.errors()):
        # The framework leaves a body of another type as bytes; curl sends a form unless it is told the type.
        sent = media_type_of(request)[:100] or "a body without a type"
        return problem_response(UnsupportedMediaType(f"send JSON with Content-Type: application/json, not {sent}"))
    items = [_item(fault, error.body) for fault in error.errors()]
    detail = "; ".join(f"{item.location}: {item.message}" for item in items)
    return problem_response(InvalidRequest(detail or "the request is not valid", errors=items))


def _item(fault: Mapping[str, Any], body: object) -> ProblemItem:
    if fault["type"] == "json_invalid" and isinstance(body, str):
        return ProblemItem(location="body", message=syntax_fault(body, int(fault["loc"][1]), fault["ctx"]["error"]))
    return ProblemItem(location=".".join(str(part) for part in fault["loc"]), message=str(fault["msg"]))


def _framework_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, BodyRefused):
        return problem_response(error.problem)
    # The framework says only that there was an error; it has read the body by then.
    fault = fault_of(error.__cause__, getattr(request, "_body", b"")) if error.__cause__ is not None else None
    if fault is not None:
        return problem_response(BadRequest(fault))
    title = HTTPStatus(error.status_code).phrase
    document = ProblemDocument(
        type=PROBLEM_TYPE_PREFIX + title.lower().replace(" ", "-"),
        title=title,
        status=error.status_code,
        detail=str(error.detail),
        request_id=current_request_id(),
    )
    content: dict[str, Any] = document.model_dump(exclude_none=True)
    return JSONResponse(content, error.status_code, headers=error.headers, media_type=PROBLEM_MEDIA_TYPE)


def _library_error(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, InvalidRolloutsError):
        return problem_response(InvalidRollouts(str(error), row=error.row, column=error.column))
    return problem_response(LimitExceeded(str(error)))
