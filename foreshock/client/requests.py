"""Requests of the client's calls: paths, bodies, and the checks of their arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from foreshock.changes import CHANGE_KINDS
from foreshock.client.deliveries import PARQUET, STATISTICS, Delivery, Registration
from foreshock.early_warning.quantities import check_declared
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint
from foreshock.json_values import finite_or_none
from foreshock.model_kind import MODEL_KINDS, known_model_kind
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.parquet import encode_rollouts_view
from foreshock.statistics_shards import FullRollouts, encode_statistics_shard

__all__ = [
    "acknowledgement",
    "acknowledgement_body",
    "change",
    "check_shard",
    "checkpoint",
    "registration",
    "rollouts",
    "scalars",
    "state",
    "statistics",
]

_ATTEMPT = {"attempt": "{attempt}"}


def registration(
    project: str,
    run_key: str,
    description: Mapping[str, Any],
    attempt_key: Callable[[int], str],
    resume_step: int,
    fingerprint: Fingerprint | Mapping[str, Any] | None,
) -> Registration:
    """Return the bodies that get or create run and attempt; None values are omitted. Raises ConfigurationError.

    `attempt_key` returns the key of the attempt that begins at a step.
    """
    _check_whole_number("resume_step", resume_step)
    model_kind = description.get("model_kind")
    if model_kind is not None and known_model_kind(model_kind) is None:
        raise ConfigurationError(f"model_kind must be one of {', '.join(MODEL_KINDS)} or None, got {model_kind!r}")
    if description.get("scalar_names") is not None:
        try:
            check_declared(description["scalar_names"])
        except ValueError as error:
            raise ConfigurationError(f"scalar_names: {error}") from error
    run = {"project": project, "key": run_key}
    run |= {name: value for name, value in description.items() if value is not None}
    fingerprint = fingerprint.to_dict() if isinstance(fingerprint, Fingerprint) else dict(fingerprint or {})
    begin = int(resume_step)
    attempt = {"key": attempt_key(begin), "resume_step": begin, "fingerprint": fingerprint, "heartbeats": True}
    _json(run), _json(attempt)
    return Registration(run=run, attempt=attempt)


def check_shard(step: int, shard: int, shards: int) -> None:
    """Raise ConfigurationError unless step >= 0 and 0 <= shard < shards."""
    _check_whole_number("step", step)
    _check_whole_number("shard", shard)
    if not shard < shards:
        raise ConfigurationError(f"shard must satisfy 0 <= shard < shards, got shard={shard!r}, shards={shards!r}")


def rollouts(
    registration: Registration, step: int, shard: int, shards: int, build: Callable[[], RolloutBatch]
) -> Delivery:
    """Build and encode one shard; call it in the background. Raises InvalidRolloutsError."""
    return Delivery(
        kind="rollouts",
        registration=registration,
        method="PUT",
        path=f"/v1/runs/{{run}}/steps/{int(step)}/rollouts/{int(shard)}",
        query={**_ATTEMPT, "shards": str(int(shards))},
        content_type=PARQUET,
        body=encode_rollouts_view(build()),
    )


def statistics(
    registration: Registration,
    step: int,
    shard: int,
    shards: int,
    build: Callable[[], RolloutBatch],
    full: FullRollouts,
) -> Delivery:
    """Build and measure one shard and encode its statistics; call it in the background. Raises InvalidRolloutsError.

    `full` is of the whole step. The sample is that of run, step and shard: the same shard gives the same bytes.
    """
    project, key = registration.run_identity
    seed = "/".join((project, key, str(int(step)), str(int(shard)), str(int(shards))))
    return Delivery(
        kind="statistics",
        registration=registration,
        method="PUT",
        path=f"/v1/runs/{{run}}/steps/{int(step)}/statistics/{int(shard)}",
        query={**_ATTEMPT, "shards": str(int(shards))},
        content_type=STATISTICS,
        body=encode_statistics_shard(build(), seed=seed, full=full.of_shard(int(shard), int(shards))),
    )


def scalars(registration: Registration, step: int, source: str, values: Mapping[str, Any]) -> Delivery:
    """Return the delivery of numbers by name; NaN and ±inf become null. Raises ConfigurationError for other types."""
    _check_whole_number("step", step)
    numbers: dict[str, float | None] = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"scalar {name!r} must be one number, got {value!r}") from error
        numbers[str(name)] = finite_or_none(number)
    path = f"/v1/runs/{{run}}/steps/{int(step)}/scalars"
    return _json_delivery("scalars", registration, "PUT", path, {"source": source, "values": numbers}, _ATTEMPT)


def checkpoint(registration: Registration, step: int, announcement: Mapping[str, Any]) -> Delivery:
    """Return the delivery that announces saved weights; None values are omitted."""
    _check_whole_number("step", step)
    body = {"format": "hf_safetensors"}
    body |= {name: value for name, value in announcement.items() if value is not None}
    target = f"/v1/runs/{{run}}/checkpoints/{int(step)}"
    return _json_delivery("checkpoint", registration, "PUT", target, body, _ATTEMPT)


def change(registration: Registration, step: int, kind: str, body: Mapping[str, Any]) -> Delivery:
    """Return the delivery that announces a change; None values are omitted."""
    _check_whole_number("step", step)
    if kind not in CHANGE_KINDS:
        raise ConfigurationError(f"kind must be one of {', '.join(CHANGE_KINDS)}, got {kind!r}")
    known = {name: value for name, value in body.items() if value is not None}
    return _json_delivery(
        "change", registration, "PUT", f"/v1/runs/{{run}}/changes/{int(step)}/{kind}", known, _ATTEMPT
    )


def state(registration: Registration, state: Literal["finished", "failed"]) -> Delivery:
    """Return the delivery that marks the end of the run."""
    return _json_delivery("state", registration, "PATCH", "/v1/runs/{run}", {"state": state}, {})


def acknowledgement_body(
    revision: int, step: int, learning_rate: float, scale: float | None = None
) -> dict[str, int | float]:
    """Return the report of what a trainer applied at a step; without a scale if that is unknown."""
    body: dict[str, int | float] = {"revision": int(revision), "step": int(step), "applied_lr": float(learning_rate)}
    return body if scale is None else body | {"applied_scale": float(scale)}


def acknowledgement(registration: Registration, body: Mapping[str, Any]) -> Delivery:
    """Return the delivery that reports the applied learning rate, see `acknowledgement_body`."""
    return _json_delivery("acknowledgement", registration, "POST", "/v1/runs/{run}/lr-advice/ack", body, {})


def _json_delivery(
    kind: Literal["scalars", "checkpoint", "change", "state", "acknowledgement"],
    registration: Registration,
    method: str,
    path: str,
    body: Mapping[str, Any],
    query: Mapping[str, str],
) -> Delivery:
    return Delivery(kind, registration, method=method, path=path, query=query, body=_json(body))


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"arguments must be JSON values with finite numbers: {error}") from error


def _check_whole_number(name: str, value: object) -> None:
    try:
        fits = int(value) == value and int(value) >= 0  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ConfigurationError(f"{name} must be a whole number >= 0, got {value!r}")
