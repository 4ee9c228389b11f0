"""The trainer's precision, as its fingerprint declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes

__all__ = ["DTYPES", "dtype_name", "with_precision"]

DTYPES: Final = ("float32", "bfloat16", "float16")

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def with_precision(attributes: BatchAttributes, precision: Mapping[str, object]) -> BatchAttributes:
    """Return `attributes` whose trainer fingerprint has the fields of `precision` that are not None.

    The fields are `master_dtype`, `autocast` and `head_dtype`. Raises ConfigurationError for an unknown dtype.
    """
    fields: dict[str, Any] = {name: _checked(name, value) for name, value in precision.items() if value is not None}
    if not fields:
        return attributes
    trainer = attributes.trainer_fingerprint or Fingerprint(engine="torch")
    return replace(attributes, trainer_fingerprint=replace(trainer, **fields))


def dtype_name(value: object) -> str | None:
    """Return the name of a dtype ("bf16", "bfloat16", torch.bfloat16), None if it is none of DTYPES."""
    name = str(value).removeprefix("torch.")
    name = _SHORT.get(name, name)
    return name if name in DTYPES else None


def _checked(field: str, value: object) -> str:
    name = dtype_name(value)
    if name is None:
        raise ConfigurationError(f"{field} must be one of {', '.join(DTYPES)} or None, got {value!r}")
    return name
