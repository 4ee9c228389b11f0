"""What becomes of an exception in a call that a trainer makes: it is counted and logged, never raised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, cast

from foreshock.client.counters import Counters
from foreshock.client.log_once import LogOnce
from foreshock.errors import ForeshockError

__all__ = ["Failures", "never_raises"]

Arguments = ParamSpec("Arguments")


class Failures:
    """Counts every exception and logs each kind once; raises them if `strict`."""

    def __init__(self, counters: Counters, log: LogOnce, *, strict: bool) -> None:
        self._counters = counters
        self._log = log
        self._strict = strict

    def note(self, name: str, error: Exception) -> None:
        """Note that the method `name` failed: by its arguments, or by a fault of this library."""
        if self._strict:
            raise error
        if isinstance(error, ForeshockError | ValueError | TypeError):
            self._counters.add(invalid=1)
            self._log.warning(f"invalid {name}", f"{name} was called with invalid arguments, nothing is sent: {error}")
        else:
            self._counters.add(internal_errors=1)
            self._log.exception(f"failed {name} {type(error).__name__}", f"{name} failed, nothing is sent", error)


class _HasFailures(Protocol):
    failures: Failures


def never_raises(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Give the exceptions of a method to its object's `failures` instead of raising them."""

    @functools.wraps(method)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        try:
            method(*arguments, **keywords)
        except Exception as error:
            cast(_HasFailures, arguments[0]).failures.note(method.__name__, error)

    return call
