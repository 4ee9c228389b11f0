"""What an answer may be: no 5xx, and what the OpenAPI document has: each error by its status and problem type."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROBLEM = "application/problem+json"


def problem_types(responses: Mapping[str, Any], status: int) -> list[str]:
    """Return the problem types that an operation declares for a status."""
    for content in responses.get(str(status), {}).get("content", {}).values():
        for part in content["schema"].get("allOf", ()):
            found: list[str] = part.get("properties", {}).get("type", {}).get("enum", [])
            if found:
                return found
    return []


@dataclass(slots=True)
class Tally:
    """Counts of answers, and the faults with an example each."""

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
        media_type = headers.get("content-type", "").partition(";")[0].strip()
        if status >= 500:
            self.note(f"{where}: {status}", f"{example}: {body[:300]!r}")
        if status >= 400:
            if media_type != PROBLEM:
                self.note(f"{where}: {status} as {media_type or 'no type'}", example)
                return
            kind = json.loads(body)["type"]
            if kind not in problem_types(responses, status):
                self.note(f"{where}: {status} {kind} is not documented", example)
            return
        documented = responses.get(str(status))
        if documented is None:
            self.note(f"{where}: {status} is not documented", example)
            return
        content = documented.get("content", {})
        if body and media_type not in content:
            self.note(f"{where}: {status} as {media_type}, documented {', '.join(content) or 'nothing'}", example)
