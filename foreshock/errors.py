"""Every error that Foreshock raises.

    ForeshockError
     ├── RolloutsError              something is wrong with rollouts or scores that were handed over
     │    ├── InvalidRolloutsError      they break the schema or a rule of it (HTTP 422)
     │    └── LimitExceededError        they are larger than what is allowed (HTTP 413)
     ├── StatisticsError            a statistics blob is damaged, or of another `statistics_version`
     ├── InvalidArgumentError       a number handed to a function makes no sense there, such as a threshold below 0
     ├── ConfigurationError         a setting is missing or makes no sense
     ├── SpoolError                 the client's folder for unsent data cannot be used
     ├── ServiceError               the service answered with an error, or not at all
     └── WeightsError               weights are missing, or are not the ones that were announced

All of them keep their fields through pickle, because decoding happens in other processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ConfigurationError",
    "ForeshockError",
    "InvalidArgumentError",
    "InvalidRolloutsError",
    "LimitExceededError",
    "RolloutsError",
    "ServiceError",
    "SpoolError",
    "StatisticsError",
    "WeightsError",
]


class ForeshockError(Exception):
    """The root: `except ForeshockError` catches whatever Foreshock raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which forgets keyword-only fields.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(kind: type[ForeshockError], arguments: tuple[Any, ...], fields: dict[str, Any]) -> ForeshockError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class RolloutsError(ForeshockError, ValueError):
    """Rollouts or scores that cannot be taken.

    `row` is the zero-based row (the rollout) and `column` the column it was seen in; both are None where the whole is
    meant. `message` says what is wrong and what to do, without the place.
    """

    def __init__(self, message: str, *, row: int | None = None, column: str | None = None) -> None:
        place = ", ".join(
            part
            for part in (
                f"row {row}" if row is not None else "",
                f"column `{column}`" if column is not None else "",
            )
            if part
        )
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.row = row
        self.column = column


class InvalidRolloutsError(RolloutsError):
    """The rollouts break the schema: a missing column, a wrong type, unequal lengths, a positive log-prob, …"""


class LimitExceededError(RolloutsError):
    """The rollouts are larger than a limit; the message names the limit and how to stay under it."""


class StatisticsError(ForeshockError, ValueError):
    """A blob of statistics cannot be read, or two of different versions or settings were to be merged."""


class InvalidArgumentError(ForeshockError, ValueError):
    """A number or name handed to a function makes no sense there; `argument` says which, `message` what is right."""

    def __init__(self, message: str, argument: str) -> None:
        super().__init__(f"`{argument}`: {message}")
        self.message = message
        self.argument = argument


class ConfigurationError(ForeshockError):
    """A setting is missing or makes no sense; the message names it and an example of a right value."""


class SpoolError(ForeshockError, OSError):
    """The folder that keeps unsent data cannot be read or written."""


class ServiceError(ForeshockError):
    """The service refused (`status` is its HTTP status) or could not be reached (`status` is None).

    `problem` is the decoded application/problem+json body, empty where there was none.
    """

    def __init__(self, message: str, *, status: int | None = None, problem: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem: dict[str, Any] = dict(problem or {})


class WeightsError(ForeshockError):
    """Weights are missing, unreadable, in a format that needs conversion, or do not match their digest."""
