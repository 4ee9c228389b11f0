"""Write docs/problem-types.md from the service's errors: `python -m scripts.problem_types_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import foreshock_service.app  # noqa: F401  (imports every module that declares an error)
from foreshock.problem_types import PROBLEM_TYPE_PREFIX
from foreshock_service.platform.problem import ProblemError

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "problem-types.md"
_HEAD: Final = f"""# Types of problems

Every error of the API is an `application/problem+json` document (RFC 9457): `type`, `title`, `status`, `detail`,
sometimes `row`, `column` or `errors`, and the `request_id` that the service's log has too. `type` is
`{PROBLEM_TYPE_PREFIX}` and one of the names below. A name keeps its meaning from release to release; match on it, not
on `title` or `detail`. Errors of the framework (404 of an unknown path, 405) have the name of their status, such as
`not-found`.

This page is generated from the service's errors by `python -m scripts.problem_types_page`.

| type | status | meaning |
| --- | --- | --- |
"""


def page() -> str:
    """Return the text of the page."""
    errors = sorted(declared_errors(), key=lambda each: each.problem_type)
    rows = [f"| `{each.problem_type}` | {each.status} | {_meaning(each)} |" for each in errors]
    return _HEAD + "\n".join(rows) + "\n"


def declared_errors(base: type[ProblemError] = ProblemError) -> Iterator[type[ProblemError]]:
    """Yield every error that the service declares."""
    for each in base.__subclasses__():
        if each.__module__.startswith("foreshock_service."):
            yield each
        yield from declared_errors(each)


def _meaning(error: type[ProblemError]) -> str:
    first = (error.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(first.split()).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page())
