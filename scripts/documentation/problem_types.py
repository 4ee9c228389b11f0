"""The page of problem types: the errors that the service declares, as their classes describe them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import foreshock_service.app  # noqa: F401  (imports every module that declares an error)
from foreshock_service.platform.problem import ProblemError

_HEAD: Final = """# Problem types

The last part of `type` in an error of the [API](../api.md#types-of-problems).

| type | status | meaning |
| --- | --- | --- |
"""


def page() -> str:
    """Return the text of the page."""
    errors = sorted(declared_errors(), key=lambda each: each.problem_type)
    return _HEAD + "".join(f"| `{each.problem_type}` | {each.status} | {_meaning(each)} |\n" for each in errors)


def declared_errors(base: type[ProblemError] = ProblemError) -> Iterator[type[ProblemError]]:
    """Yield every error that the service declares."""
    for each in base.__subclasses__():
        if each.__module__.startswith("foreshock_service."):
            yield each
        yield from declared_errors(each)


def _meaning(error: type[ProblemError]) -> str:
    first = (error.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(first.split()).replace("|", r"\|")
