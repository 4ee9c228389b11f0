"""Write the table of problem types into docs/api.md: `python -m scripts.problem_types_page [--check]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import foreshock_service.app  # noqa: F401  (imports every module that declares an error)
from foreshock_service.platform.problem import ProblemError
from scripts.generated import write_or_check

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "api.md"
_BLOCK: Final = re.compile(r"(<!-- problem types -->\n).*?(<!-- end of problem types -->)", re.DOTALL)


def page() -> str:
    """Return the text of the page with a current table of problem types."""
    errors = sorted(declared_errors(), key=lambda each: each.problem_type)
    rows = [f"| `{each.problem_type}` | {each.status} | {_meaning(each)} |" for each in errors]
    table = "\n".join(["| type | status | meaning |", "| --- | --- | --- |", *rows])
    return _BLOCK.sub(lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text())


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
    sys.exit(write_or_check("problem_types_page", {PAGE: page()}))
