"""Deliveries: one HTTP request each, complete enough to be sent by another process later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foreshock.changes import CHANGE_KINDS
from foreshock.digests import digest_of_bytes
from foreshock.statistics_shards.body import MEDIA_TYPE as STATISTICS

__all__ = ["PARQUET", "STATISTICS", "Delivery", "Registration"]

PARQUET = "application/vnd.apache.parquet"

_SLICE_BYTES = 256 * 1024

Kind = Literal["register", "rollouts", "statistics", "scalars", "checkpoint", "change", "state", "acknowledgement"]


_STEP = r"/v1/runs/\{run\}/steps/\d+"
_REQUESTS: Mapping[Kind, re.Pattern[str]] = {
    "register": re.compile(""),
    "rollouts": re.compile(rf"PUT {_STEP}/rollouts/\d+"),
    "statistics": re.compile(rf"PUT {_STEP}/statistics/\d+"),
    "scalars": re.compile(rf"PUT {_STEP}/scalars"),
    "checkpoint": re.compile(r"PUT /v1/runs/\{run\}/checkpoints/\d+"),
    "change": re.compile(rf"PUT /v1/runs/\{{run\}}/changes/\d+/({'|'.join(CHANGE_KINDS)})"),
    "state": re.compile(r"PATCH /v1/runs/\{run\}"),
    "acknowledgement": re.compile(r"POST /v1/runs/\{run\}/lr-advice/ack"),
}
"""Method and path of each kind. No other request is read back from a disk: files in a folder may be planted."""

_QUERY = {"attempt": re.compile(r"\{attempt\}"), "shards": re.compile(r"\d+")}
_CONTENT_TYPES = frozenset({"application/json", PARQUET, STATISTICS})


@dataclass(frozen=True, slots=True)
class Registration:
    """The run and attempt of a delivery, with the request bodies that get or create them.

    `run` and `attempt` are the JSON bodies of `POST /v1/runs` and `POST /v1/runs/{run}/attempts`; both are
    get-or-create by their `key`, so sending them again from another process is harmless.
    """

    run: Mapping[str, Any]
    attempt: Mapping[str, Any]

    @property
    def run_identity(self) -> tuple[str, str]:
        """Project and client key, which identify the run."""
        return str(self.run["project"]), str(self.run["key"])

    @property
    def identified(self) -> Registration:
        """Return the registration without what describes run and attempt, which a service may find invalid."""
        run = {name: self.run[name] for name in ("project", "key")}
        attempt = {name: self.attempt[name] for name in ("key", "resume_step", "heartbeats") if name in self.attempt}
        return Registration(run, attempt)

    @property
    def attempt_key(self) -> str:
        """The client's key of the attempt, which identifies it within the run."""
        return str(self.attempt["key"])


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request. `path` and the values of `query` may hold `{run}` and `{attempt}`, filled in when sending."""

    kind: Kind
    registration: Registration
    method: str = ""
    path: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    body: bytes | memoryview = b""

    def slices(self) -> Iterator[bytes]:
        """Yield the body in slices of 256 KiB, so that no step of sending holds the GIL for long."""
        view = memoryview(self.body)
        for start in range(0, len(view), _SLICE_BYTES):
            yield bytes(view[start : start + _SLICE_BYTES])

    @property
    def needed(self) -> bool:
        """True for small deliveries that others depend on: no bound on size drops them."""
        return self.kind in ("register", "state", "checkpoint", "change")

    @property
    def is_shard(self) -> bool:
        """True for a shard of rollouts, sent as tokens or as statistics."""
        return self.kind in ("rollouts", "statistics")

    def describe(self) -> str:
        """Return a short description for log messages."""
        return f"{self.kind} ({self.method} {self.path})" if self.path else f"{self.kind} of the run"

    def metadata_json(self) -> str:
        """Return everything except the body as JSON, with the body's digest."""
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
        """Rebuild a delivery from `metadata_json()` and its body. Raises ValueError if they do not match."""
        try:
            values = json.loads(text)
            if values["digest"] != digest_of_bytes(body):
                raise ValueError("the digest of the bytes differs from the recorded one")
            delivery = cls(
                kind=values["kind"],
                registration=Registration(run=dict(values["run"]), attempt=dict(values["attempt"])),
                method=values["method"],
                path=values["path"],
                query=dict(values["query"]),
                content_type=values["content_type"],
                body=body,
            )
            delivery._check_request()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the metadata is incomplete: {error}") from error
        return delivery

    def _check_request(self) -> None:
        """Raise ValueError unless the client itself makes such a request."""
        request = f"{self.method} {self.path}".strip()
        known = _REQUESTS[self.kind].fullmatch(request) is not None and self.content_type in _CONTENT_TYPES
        known = known and all(_QUERY[name].fullmatch(value) is not None for name, value in self.query.items())
        if (
            not known
            or not {"project", "key"} <= self.registration.run.keys()
            or "key" not in self.registration.attempt
        ):
            raise ValueError(f"{request!r} is no request of this client")
