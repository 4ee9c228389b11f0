"""Deliveries: one HTTP request each, complete enough to be sent by another process later.

The functions make the deliveries of the client's calls and check their arguments.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.api.runs import LARGEST_STEP, LONGEST_NAME, NAME_PATTERN
from foreshock.changes import CHANGE_KINDS
from foreshock.errors import ConfigurationError
from foreshock.json_values import finite_or_none
from foreshock.notary.compare import Holding
from foreshock.notary.pieces import Tensors
from foreshock.notary.reports import encode_report
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS

PARQUET = "application/vnd.apache.parquet"
BEGAN = "began_at_us"
"""Field with the time at which an attempt began, by this node's clock. The request sends its age instead."""

_OF_ATTEMPT = ("key", "resume_step", "heartbeats", BEGAN)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SLICE_BYTES = 256 * 1024

_RUN, _STEP = "/v1/runs/{run}", "/v1/runs/{run}/steps/{step}"
_JSON = "application/json"
_REQUESTS: Mapping[str, tuple[str, str, str]] = {
    "rollouts": ("PUT", f"{_STEP}/rollouts/{{shard}}", PARQUET),
    "statistics": ("PUT", f"{_STEP}/statistics/{{shard}}", STATISTICS),
    "scalars": ("PUT", f"{_STEP}/scalars", _JSON),
    "checkpoint": ("PUT", f"{_RUN}/checkpoints/{{step}}", _JSON),
    "change": ("PUT", f"{_RUN}/changes/{{step}}/{{change}}", _JSON),
    "weights": ("PUT", f"{_STEP}/weights", PARQUET),
    "state": ("PATCH", _RUN, _JSON),
    "rate": ("POST", f"{_RUN}/lr-advice/ack", _JSON),
    "lever": ("POST", f"{_RUN}/advice/ack", _JSON),
}
"""Method, path and content type of each kind, but for "register". Files in a spool name no other request."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The run and attempt of a delivery, with the request bodies that get or create them.

    `run` and `attempt` are the JSON bodies of `POST /v1/runs` and `POST /v1/runs/{run}/attempts`, see `attempt_body`;
    both are get-or-create by their `key`, so sending them again from another process is harmless.
    """

    run: Mapping[str, Any]
    attempt: Mapping[str, Any]

    @property
    def run_identity(self) -> tuple[str, str]:
        """Project and client key, which identify the run."""
        return str(self.run["project"]), str(self.run["key"])

    @property
    def attempt_identity(self) -> tuple[str, str, str]:
        """Project, client key of the run, and client key of the attempt."""
        return (*self.run_identity, str(self.attempt["key"]))

    def same_attempt(self, other: Registration | None) -> bool:
        """Return whether both name one attempt: each item that is read from disk has a registration of its own."""
        return other is not None and other.attempt_identity == self.attempt_identity

    def attempt_body(self, at_us: int) -> dict[str, Any]:
        """Return the attempt with its age in seconds at a time, in place of the time when it began."""
        body = dict(self.attempt)
        return body | {"age_seconds": max(0, at_us - int(body.pop(BEGAN, at_us))) / 1e6}

    @property
    def identified(self) -> Registration:
        """Return the registration without the descriptions of run and attempt, which a service may find invalid."""
        run = {name: self.run[name] for name in ("project", "key")}
        attempt = {name: self.attempt[name] for name in _OF_ATTEMPT if name in self.attempt}
        return Registration(run, attempt)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request: its kind, the run and attempt, the numbers in its path (`step`, `shard`, `shards`), and its body.

    The kind is "register", which has no request of its own, or one of `_REQUESTS`.
    """

    kind: str
    registration: Registration
    place: Mapping[str, int | str] = field(default_factory=dict)
    body: bytes | memoryview = b""

    def request(self, run: str, attempt: int) -> dict[str, Any]:
        """Return the arguments of `ServiceConnection.request`.

        The body is in slices of 256 KiB, so that no step of sending holds the GIL for long. An acknowledgement and the
        end of a run name the attempt, whose number is unknown when they are logged, in their JSON.
        """
        method, path, content_type = _REQUESTS[self.kind]
        body = memoryview(self.body)
        if method != "PUT":
            body = memoryview(bytes(body).removesuffix(b"}") + b', "attempt": %d}' % attempt)
        return {
            "method": method,
            "path": path.format(run=run, **self.place),
            "query": {"attempt": attempt, "shards": self.place.get("shards")} if method == "PUT" else None,
            "content": (body[start : start + _SLICE_BYTES] for start in range(0, len(body), _SLICE_BYTES)),
            "headers": {"Content-Type": content_type, "Content-Length": str(len(body))},
        }

    @property
    def needed(self) -> bool:
        """True for small deliveries that others depend on: no bound on size drops them."""
        return self.kind in ("register", "state", "checkpoint", "change")

    def describe(self) -> str:
        """Return a short description for log messages."""
        return " ".join([self.kind, *(f"{name} {value}" for name, value in self.place.items())])

    def metadata(self) -> dict[str, Any]:
        """Return everything except the body as JSON values, with the body's checksum."""
        return {
            "kind": self.kind,
            "place": dict(self.place),
            "run": dict(self.registration.run),
            "attempt": dict(self.registration.attempt),
            "crc32": zlib.crc32(self.body),
            "size": len(self.body),
        }

    @classmethod
    def from_metadata(cls, text: str | bytes, body: bytes | memoryview) -> Delivery:
        """Rebuild a delivery from the JSON of `metadata()` and its body.

        Raises ValueError if they do not match, or if the client itself makes no such request.
        """
        try:
            values = parse_json(text)
            if values["size"] != len(body) or values["crc32"] != zlib.crc32(body):
                raise ValueError("the size or the checksum of the bytes differs from the recorded one")
            registration = Registration(dict(values["run"]), dict(values["attempt"]))
            delivery = cls(values["kind"], registration, dict(values["place"]), body)
            if not all(type(each) is int or each in CHANGE_KINDS for each in delivery.place.values()):
                raise ValueError(f"{delivery.describe()} is no request of this client")
            # They raise KeyError for what is missing.
            _ = registration.attempt_identity, delivery.kind == "register" or delivery.request("", 0)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the metadata is incomplete: {error}") from error
        return delivery


def check_shard(step: int, shard: int, shards: int) -> None:
    """Raise ConfigurationError unless step >= 0 and 0 <= shard < shards."""
    check_whole_number("step", step)
    check_whole_number("shard", shard)
    if not shard < shards:
        raise ConfigurationError(f"shard must satisfy 0 <= shard < shards, got shard={shard!r}, shards={shards!r}")


def check_digest(digest: object) -> None:
    """Raise ConfigurationError unless a digest of weights has the form of those of `weights_digest`."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigurationError(f"digest must be sha256: and 64 hexadecimal digits, got {str(digest)[:100]!r}")


def checked_attributes(attributes: object) -> BatchAttributes:
    """Return attributes of a batch. Raises ConfigurationError if they have another type."""
    if not isinstance(attributes, BatchAttributes):
        raise ConfigurationError(
            f"attributes must be a BatchAttributes, got {type(attributes).__name__}; from a mapping: "
            "BatchAttributes(**attributes)"
        )
    return attributes


def checked_scalars(values: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    """Return the numbers by name, None for NaN and ±inf, and a sentence about each value that no service would take."""
    numbers, wrong = dict[str, float | None](), list[str]()
    for name, value in dict(values).items():
        if len(str(name)) > LONGEST_NAME or not re.fullmatch(NAME_PATTERN, str(name)):
            wrong.append(f"the name of a scalar must be one line of 1 to {LONGEST_NAME} characters, got {name!r:.100}")
            continue
        try:
            # A tensor with a gradient warns when it becomes a number.
            value = value.detach() if hasattr(value, "detach") else value
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            wrong.append(f"scalar {name!r} must be one number, got {value!r:.100}")
        else:
            numbers[str(name)] = finite_or_none(number)
    return numbers, wrong


def weights(
    registration: Registration,
    step: int,
    trainer: Holding | None,
    engines: Mapping[str, Holding],
    variants: Mapping[str, Tensors],
    engines_in_all: int | None,
) -> Delivery:
    """Return the delivery of what trainer and engines hold; for an engine, the tensors that differ from the trainer's.

    Raises WeightsError if it is too large.
    """
    holders = {}
    if trainer is not None:
        holders["trainer"] = _said(trainer, {})
        holders |= {f"variant:{name}": _said(Holding(tensors), {}) for name, tensors in variants.items()}
    announced = {} if trainer is None else trainer.wholes
    holders |= {f"engine:{name}": _said(held, announced) for name, held in engines.items()}
    body = encode_report(holders, engines_in_all or len(engines) or None)
    return Delivery("weights", registration, {"step": int(step)}, body)


def _said(holding: Holding, announced: Mapping[str, Any]) -> dict[str, Any]:
    is_whole = bool(announced) and announced.keys() <= holding.tensors.keys()
    tensors = {
        name: pieces
        for name, pieces in holding.tensors.items()
        if not is_whole or announced.get(name) is None or holding.wholes[name] != announced[name]
    }
    return {"tensors": tensors, "canary": [float(each) for each in holding.canary], "others_as_announced": is_whole}


def finite(name: str, value: Any) -> float:
    """Return a number. Raises ConfigurationError for what is none, NaN and ±inf."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"{name} must be a finite number, got {value!r}")
    return number


def check_whole_number(name: str, value: object) -> None:
    try:
        fits = int(value) == value and 0 <= int(value) <= LARGEST_STEP  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ConfigurationError(f"{name} must be a whole number from 0 to {LARGEST_STEP}, got {value!r}")
