"""Every public error, as one tree. docs/api.md lists when each is raised and what to do.

    ForeshockError
     ├── RolloutsError              invalid rollouts or scores
     │    ├── InvalidRolloutsError      they break the schema or one of its rules (HTTP 422)
     │    └── LimitExceededError        they exceed a size limit (HTTP 413)
     ├── StatisticsError            a statistics blob is damaged, or of another `statistics_version`
     ├── InvalidArgumentError       an argument of a function is out of range, such as a threshold below 0
     ├── ConfigurationError         a setting is missing or invalid
     ├── SpoolError                 the client's folder for unsent data cannot be read or written
     ├── ServiceError               the service answered with an error, or did not answer
     │    ├── ServiceUnavailable        no answer, or HTTP 408, 425, 429, 5xx: the same request may succeed later
     │    │    └── WrongService             the address is not a Foreshock service
     │    ├── Unauthorized              HTTP 401 or 403: the API key is missing, wrong, or lacks a scope
     │    └── Rejected                  any other HTTP 4xx: the same request will fail again
     │         └── RunNotFound              no run has that id, key or name
     └── WeightsError               weights are missing, or are not the announced ones

All of them keep their fields through pickle, because decoding happens in other processes.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "ConfigurationError",
    "ForeshockError",
    "InvalidArgumentError",
    "InvalidRolloutsError",
    "LimitExceededError",
    "Rejected",
    "RolloutsError",
    "RunNotFound",
    "ServiceError",
    "ServiceUnavailable",
    "SpoolError",
    "StatisticsError",
    "Unauthorized",
    "WeightsError",
    "WrongService",
]

# Types of problems of the API that the client acts on, and what the names of all types begin with.
PROBLEM_TYPE_PREFIX = "urn:foreshock:problem:"
HOST_NOT_ALLOWED = "host-not-allowed"
RUN_NOT_FOUND = "run-not-found"

_SIMILARITY = 0.6


class ForeshockError(Exception):
    """Base class: `except ForeshockError` catches every error that Foreshock raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which loses keyword-only fields.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(kind: type[ForeshockError], arguments: tuple[Any, ...], fields: dict[str, Any]) -> ForeshockError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class RolloutsError(ForeshockError, ValueError):
    """Invalid rollouts or scores.

    `row` is the zero-based row (the rollout) and `column` the name of the column; both are None if the error concerns
    the whole table. `message` is the text without row and column, `fault` the text without `advice`, which is for the
    sender of the rollouts.
    """

    def __init__(
        self, message: str, *, row: int | None = None, column: str | None = None, advice: str | None = None
    ) -> None:
        place = ", ".join(
            part
            for part in (f"row {row}" if row is not None else "", f"column `{column}`" if column is not None else "")
            if part
        )
        self.fault = f"{place}: {message}" if place else message
        end = "" if advice is None else f": {advice}"
        super().__init__(self.fault + end)
        self.message = message + end
        self.row = row
        self.column = column


class InvalidRolloutsError(RolloutsError):
    """The rollouts break the schema: a missing column, a wrong type, unequal lengths, a positive log-prob, …"""


class LimitExceededError(RolloutsError):
    """The rollouts exceed a size limit; the message names the limit and how to stay under it."""


class StatisticsError(ForeshockError, ValueError):
    """A statistics blob cannot be read, or blobs of different versions or settings cannot be merged."""


class InvalidArgumentError(ForeshockError, ValueError):
    """An argument is out of range; `argument` is its name, `message` is the expected range."""

    def __init__(self, message: str, argument: str) -> None:
        super().__init__(f"`{argument}`: {message}")
        self.message = message
        self.argument = argument


class ConfigurationError(ForeshockError):
    """A setting is missing or invalid; the message names it and gives a valid example."""


class SpoolError(ForeshockError, OSError):
    """The folder for unsent data cannot be read or written."""


class ServiceError(ForeshockError):
    """The service answered with an error, or did not answer.

    `status` is the HTTP status (None without an answer), `problem` the decoded application/problem+json body (empty
    without one), `retry_after_seconds` the service's Retry-After (None without one).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        problem: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem: dict[str, Any] = dict(problem or {})
        self.retry_after_seconds = retry_after_seconds


class ServiceUnavailable(ServiceError):
    """No answer, or one that says "later" (HTTP 408, 425, 429, 5xx): the same request may succeed later."""


class WrongService(ServiceUnavailable):
    """The address answers, but not as a Foreshock service that this release understands.

    Temporary like its base class: a proxy may answer while the service restarts.
    """


class Unauthorized(ServiceError):
    """HTTP 401 or 403: the API key is missing, unknown or revoked, or lacks the scope or project."""


class Rejected(ServiceError):
    """HTTP 4xx that is final: the same request will fail again."""


class RunNotFound(Rejected):
    """No run has that id, key or name."""


class WeightsError(ForeshockError):
    """Weights are missing or unreadable, need conversion, or do not match their digest."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'name'?` for the most similar known name, "" if none is similar."""
    found = nearest(given, known)
    return f", did you mean {found!r}?" if found is not None else ""


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name, None if none is similar."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given.lower(), names, n=1, cutoff=_SIMILARITY)
    return names[found[0]] if found else None
