"""Judge answers: no 5xx, and only what the OpenAPI document declares; an error is a problem of a documented type."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any

from foreshock.errors import PROBLEM_TYPE_PREFIX
from scripts.documentation.problem_types import declared_errors

PROBLEM = "application/problem+json"
# Content types of a page, its figures and its static files.
_OF_PAGES = frozenset({"text/html", "text/plain", "application/json", "text/javascript", "text/css", "image/svg+xml"})
# Answers of the framework: an unknown path, and a method that a path does not have.
_OF_THE_FRAMEWORK = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


_NO_HTTP = b"Invalid HTTP request received."


def is_known(status: int, headers: Mapping[str, str], body: bytes, *, of_a_form: bool = False) -> bool:
    """Return whether an error is a problem document of a documented type with the status of that type.

    A form of a page may also be answered with a page. Bytes that are not HTTP never reach the application: the HTTP
    server refuses them with a line of text.
    """
    if of_a_form and _media_type(headers) == "text/html":
        return status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.UNPROCESSABLE_ENTITY)
    if status == 400 and body in (b"", _NO_HTTP) and _media_type(headers) == "text/plain":
        return True
    if _media_type(headers) != PROBLEM:
        return False
    # An answer to HEAD has no body.
    return not body or (json.loads(body)["type"], status) in _known_problems()


@cache
def _known_problems() -> frozenset[tuple[str, int]]:
    own = {(PROBLEM_TYPE_PREFIX + each.problem_type, each.status) for each in declared_errors()}
    return frozenset(
        own | {(PROBLEM_TYPE_PREFIX + each.phrase.lower().replace(" ", "-"), each.value) for each in _OF_THE_FRAMEWORK}
    )


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip()


@dataclass(slots=True)
class Tally:
    """Counts of answers, and the faults, each with an example."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, fault: str, example: str) -> None:
        """Count a fault; keep the first example."""
        self.faults[fault] += 1
        self.examples.setdefault(fault, example)

    def judge(
        self,
        operation: tuple[str, str],
        responses: Mapping[str, Any],
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        example: str,
    ) -> None:
        """Count the answer of an operation (method and path), whose `responses` are those of the OpenAPI document."""
        self.requests += 1
        self.statuses[status] += 1
        where = " ".join(operation)
        media_type = _media_type(headers)
        if status >= 500:
            self.note(f"{where}: {status}", f"{example}: {body[:300]!r}")
        if status >= 400:
            if media_type != PROBLEM or media_type not in responses["default"]["content"]:
                self.note(f"{where}: {status} as {media_type or 'no type'}", example)
            elif not is_known(status, headers, body):
                self.note(f"{where}: {status} {json.loads(body)['type']} is not documented", example)
            return
        documented = responses.get(str(status))
        if documented is None:
            self.note(f"{where}: {status} is not documented", example)
            return
        content = documented.get("content", {})
        if body and media_type not in content:
            self.note(f"{where}: {status} as {media_type}, documented {', '.join(content) or 'nothing'}", example)

    def judge_page(self, path: str, status: int, headers: Mapping[str, str], body: bytes, example: str) -> None:
        """Count the answer of a page: any document of pages, or a documented problem."""
        self.requests += 1
        self.statuses[status] += 1
        media_type = _media_type(headers)
        if status >= 500:
            self.note(f"GET {path}: {status}", f"{example}: {body[:300]!r}")
        elif media_type == PROBLEM:
            if not is_known(status, headers, body):
                self.note(f"GET {path}: {status} is no documented problem", f"{example}: {body[:300]!r}")
        elif body and media_type not in _OF_PAGES:
            self.note(f"GET {path}: {status} as {media_type or 'no type'}", example)
