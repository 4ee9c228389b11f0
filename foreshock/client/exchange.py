"""What a request to the service and its answer consist of, without sending: for the connection and its async twin.

Every failure is a ServiceError: ServiceUnavailable, WrongService, Unauthorized or Rejected (`foreshock/errors.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from foreshock.errors import (
    ConfigurationError,
    Rejected,
    RunNotFound,
    ServiceError,
    ServiceUnavailable,
    Unauthorized,
    WrongService,
)
from foreshock.problem_types import PROBLEM_TYPE_PREFIX, RUN_NOT_FOUND

__all__ = [
    "DEFAULT_URL",
    "FAILURES",
    "Query",
    "QueryValue",
    "checked_url",
    "configured",
    "decoded",
    "default_headers",
    "error_of",
    "no_answer",
    "parameters_of",
    "problem_of",
    "timeout_of",
    "wrong_service",
]

DEFAULT_URL = "http://127.0.0.1:8765"

FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError)
"""What httpx raises if there is no answer; RuntimeError: the connection was closed meanwhile."""

_TEMPORARY_STATUSES = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})
_CONNECT_SECONDS = 5.0

QueryValue = str | int | float | None
Query = Mapping[str, QueryValue] | list[tuple[str, QueryValue]] | None


def checked_url(url: str) -> str:
    """Return the address without a slash at its end. Raises ConfigurationError if it is not an http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(
            f"the service's address must look like {DEFAULT_URL}, got {url!r}; check FORESHOCK_URL"
        )
    return url.rstrip("/")


def configured(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return the address and the key: those given, else `FORESHOCK_URL` and `FORESHOCK_API_KEY`, else the defaults."""
    address = url or os.environ.get("FORESHOCK_URL") or DEFAULT_URL
    return address, api_key or os.environ.get("FORESHOCK_API_KEY") or None


def default_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request."""
    headers = {"User-Agent": "foreshock-client"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def timeout_of(seconds: float) -> httpx.Timeout:
    """Return the timeouts of a request; connecting has at most five seconds."""
    return httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))


def parameters_of(query: Query) -> Any:
    """Return the query without the parameters that are None."""
    pairs = list(query.items()) if isinstance(query, Mapping) else query or []
    return [(name, value) for name, value in pairs if value is not None]


def no_answer(url: str, error: Exception) -> ServiceUnavailable:
    """Return the error for a request without an answer."""
    reason = str(error) or type(error).__name__
    return ServiceUnavailable(f"no answer from {url}: {reason}; check that the service runs, and FORESHOCK_URL")


def wrong_service(url: str) -> WrongService:
    """Return the error for an answer that no Foreshock service gives."""
    return WrongService(f"{url} is not a Foreshock service; check FORESHOCK_URL")


def decoded(url: str, response: httpx.Response) -> Any:
    """Return the JSON of an answer. Raises WrongService if it is not JSON."""
    try:
        return response.json()
    except ValueError as error:
        raise wrong_service(url) from error


def error_of(url: str, response: httpx.Response) -> ServiceError | None:
    """Return the error of an answer, None for a 2xx or 304."""
    status = response.status_code
    if status < 300 or status == httpx.codes.NOT_MODIFIED:
        return None
    problem = problem_of(response)
    detail = problem.get("detail") or problem.get("title") or response.reason_phrase
    message = f"{response.request.method} {response.request.url.path}: {status} {detail}"
    fields: dict[str, Any] = {
        "status": status, "problem": problem, "retry_after_seconds": _retry_after_seconds(response)
    }  # fmt: skip
    if status < 400:
        target = response.headers.get("Location", "another address")
        return WrongService(f"{url} redirects to {target}; set FORESHOCK_URL to the final address", **fields)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Unauthorized(f"{message}; check FORESHOCK_API_KEY", **fields)
    if status >= 500 or status in _TEMPORARY_STATUSES:
        return ServiceUnavailable(message, **fields)
    if problem.get("type") == PROBLEM_TYPE_PREFIX + RUN_NOT_FOUND:
        return RunNotFound(message, **fields)
    return Rejected(message, **fields)


def problem_of(response: httpx.Response) -> dict[str, Any]:
    """Return the problem+json of an error answer; the start of its text as `detail` if it is not JSON."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    return dict(body) if isinstance(body, dict) else {"detail": response.text[:500]}


def _retry_after_seconds(response: httpx.Response) -> float | None:
    """Return the Retry-After header in seconds from now (it may be a number or an HTTP date), None without one."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    # A date without a zone ("-0000") is UTC by RFC 5322.
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
