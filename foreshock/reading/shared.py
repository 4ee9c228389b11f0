"""What callers of both kinds share: address, key, project, which failures are retried, and how an answer is read."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from foreshock.client.exchange import configured, wrong_service
from foreshock.errors import ServiceUnavailable, WrongService
from foreshock.reading.remembered import RememberedAnswers
from foreshock.reading.request import Request
from foreshock.retry import Backoff

__all__ = ["CallerSettings", "describe_method", "is_retryable", "read_answer", "retryable_of"]

Answer = TypeVar("Answer")


class CallerSettings:
    """The address, key and project of a reader or operator, and how long it waits and retries."""

    def __init__(
        self, url: str | None, project: str | None, api_key: str | None, timeout_seconds: float, retry_seconds: float
    ) -> None:
        self.url, self.api_key = configured(url, api_key)
        self.project = project
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds

    def arguments(self, request: Request[Any], remembered: RememberedAnswers | None) -> dict[str, Any]:
        """Return what a connection's `request` takes beside method and path."""
        kept = {} if remembered is None else remembered.headers(request.asked)
        return {
            "query": request.parameters(self.project),
            "content": request.content,
            "headers": {**request.headers, **kept},
            "timeout_seconds": self.timeout_seconds + request.wait_seconds,
        }

    def backoff(self) -> Backoff:
        """Return the delays between the attempts at one request."""
        return Backoff(first_seconds=0.25, longest_seconds=5.0)


def read_answer(
    url: str, request: Request[Answer], response: httpx.Response, remembered: RememberedAnswers | None = None
) -> Answer:
    """Return what the response says, or said before if it is 304. Raises WrongService if it cannot be read."""
    try:
        body = response.content if remembered is None else remembered.body(request.asked, response)
        return request.read(body)
    except json.JSONDecodeError as error:
        raise wrong_service(url) from error
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise WrongService(
            f"this release cannot read the answer of {url} to {request.path} ({problem}); check FORESHOCK_URL, and "
            "that client and service are at most one release apart"
        ) from error


def is_retryable(error: Exception) -> bool:
    """Return True if the same request may succeed later; one to a wrong address will not."""
    return isinstance(error, ServiceUnavailable) and not isinstance(error, WrongService)


def retryable_of(request: Request[Any]) -> Callable[[Exception], bool]:
    """Return which failures of a request are retried.

    One that is not repeatable is sent again only if the service has certainly not begun it: no connection, or 429.
    """
    return is_retryable if request.is_repeatable else _was_not_begun


def _was_not_begun(error: Exception) -> bool:
    never_sent = isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
    too_many = isinstance(error, ServiceUnavailable) and error.status == httpx.codes.TOO_MANY_REQUESTS
    return never_sent or too_many


def describe_method(method: Callable[..., Any], request: Callable[..., Any]) -> None:
    """Give a method the name, documentation and parameters of the function that makes its request."""
    method.__name__, method.__doc__ = request.__name__, request.__doc__
    signature = inspect.signature(request)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *signature.parameters.values()]
    vars(method)["__signature__"] = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
