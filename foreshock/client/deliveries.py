"""What is on its way to the service: one HTTP request each, whole enough to be sent by another process later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foreshock.digests import digest_of_bytes

__all__ = ["PARQUET", "Delivery", "Registration"]

PARQUET = "application/vnd.apache.parquet"

_SLICE_BYTES = 256 * 1024

Kind = Literal["register", "rollouts", "scalars", "checkpoint", "state", "acknowledgement"]


@dataclass(frozen=True, slots=True)
class Registration:
    """Which run and attempt something belongs to, and all that is needed to (get or) create both.

    `run` and `attempt` are the JSON bodies of `POST /v1/runs` and `POST /v1/runs/{run}/attempts`; both are
    get-or-create by their `key`, so sending them again from another process is harmless.
    """

    run: Mapping[str, Any]
    attempt: Mapping[str, Any]

    @property
    def run_identity(self) -> tuple[str, str]:
        """Project and client key: what makes it one run."""
        return str(self.run["project"]), str(self.run["key"])

    @property
    def attempt_key(self) -> str:
        """What makes it one attempt of the run."""
        return str(self.attempt["key"])


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request. `path` and the values of `query` may hold `{run}` and `{attempt}`, filled in when it is sent."""

    kind: Kind
    registration: Registration
    method: str = ""
    path: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    body: bytes | memoryview = b""

    def slices(self) -> Iterator[bytes]:
        """The body in pieces, so that no step of sending it holds the interpreter's lock for long."""
        view = memoryview(self.body)
        for start in range(0, len(view), _SLICE_BYTES):
            yield bytes(view[start : start + _SLICE_BYTES])

    @property
    def needed(self) -> bool:
        """Whether it is small and others depend on it, so that no bound on size drops it."""
        return self.kind in ("register", "state", "checkpoint")

    def describe(self) -> str:
        """A few words for log messages."""
        return f"{self.kind} ({self.method} {self.path})" if self.path else f"{self.kind} of the run"

    def metadata_json(self) -> str:
        """All but the body, and the body's digest."""
        return json.dumps(
            {
                "kind": self.kind,
                "method": self.method,
                "path": self.path,
                "query": dict(self.query),
                "content_type": self.content_type,
                "run": dict(self.registration.run),
                "attempt": dict(self.registration.attempt),
                "digest": digest_of_bytes(self.body),
                "size": len(self.body),
            },
            indent=1,
        )

    @classmethod
    def from_metadata(cls, text: str | bytes, body: bytes) -> Delivery:
        """The delivery of `metadata_json()` and its body. Raises ValueError where the two do not belong together."""
        try:
            values = json.loads(text)
            if values["digest"] != digest_of_bytes(body):
                raise ValueError("the bytes are not the ones that were written")
            return cls(
                kind=values["kind"],
                registration=Registration(run=values["run"], attempt=values["attempt"]),
                method=values["method"],
                path=values["path"],
                query=values["query"],
                content_type=values["content_type"],
                body=body,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the metadata lacks {error}") from error
