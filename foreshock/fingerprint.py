"""The fingerprint of a score: everything that can change the last bits of a log-prob.

Two scores are of the same scorer only if their fingerprints are equal. A link of the chain measures the effect of the
fields in which two fingerprints differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from foreshock.digests import canonical_json, digest_of_bytes
from foreshock.errors import ConfigurationError
from foreshock.parsing import parse_json

DTYPES: Final = ("float32", "bfloat16", "float16")
ADAPTER_FLAG: Final = "adapter"
"""The flag of a replay's fingerprint that says how a LoRA adapter was applied."""
MERGED_ADAPTER: Final = "merged in float32"
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The engine, settings, weights and hardware of a score. None (or an empty mapping) means not known.

    `flags` and `library_versions` map names to values as text. `weights_digest` is the result of
    `foreshock.digests.weights_digest`. `batch_composition` describes how tokens were grouped for a forward pass, such
    as "128 padded right"; scores that differ only in it give the noise floor. Raises ConfigurationError for a field of
    another type, or an empty `engine`.
    """

    engine: str
    engine_version: str | None = None
    dtype: str | None = None
    head_dtype: str | None = None
    master_dtype: str | None = None
    autocast: str | None = None
    quantization: str | None = None
    logprobs_mode: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    attention_backend: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    weights_version: int | None = None
    weights_digest: str | None = None
    batch_composition: str | None = None
    device_name: str | None = None
    cpu_isa: str | None = None
    driver: str | None = None
    library_versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, hint in _field_types().items():
            object.__setattr__(self, name, _checked(name, hint, getattr(self, name)))
        if not self.engine:
            raise ConfigurationError("a fingerprint needs an `engine`, such as 'vllm' or 'torch'")

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_dict(self) -> dict[str, Any]:
        """Return the known fields as plain JSON values."""
        known = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is None or value == {}:
                continue
            known[item.name] = dict(value) if isinstance(value, Mapping) else value
        return known

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Restore the fingerprint from `to_dict()`. A field of a newer release is ignored.

        Raises ConfigurationError if a field has another type or `engine` is missing.
        """
        names = {item.name for item in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        if "engine" not in known:
            raise ConfigurationError("a fingerprint needs an `engine`, such as 'vllm' or 'torch'")
        return cls(**known)

    def to_json(self) -> str:
        """Return the known fields as canonical JSON; equal fingerprints give equal text."""
        return canonical_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> Fingerprint:
        """Restore the fingerprint from `to_json()`. Raises ConfigurationError if `text` is not one."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ConfigurationError(
                f"a fingerprint must be a JSON object, got text that is not JSON: {error}"
            ) from error
        if not isinstance(values, dict):
            raise ConfigurationError(f"a fingerprint must be a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    def digest(self) -> str:
        """Return the digest `sha256:…` of the canonical JSON."""
        return digest_of_bytes(self.to_json().encode())


def with_precision(trainer: Fingerprint | None, precision: Mapping[str, object]) -> Fingerprint | None:
    """Return a trainer's fingerprint with the fields of `precision` that are not None; unchanged if all are.

    The fields are `master_dtype`, `autocast` and `head_dtype`. Raises ConfigurationError for an unknown dtype.
    """
    fields: dict[str, Any] = {}
    for field_name, value in precision.items():
        if value is None:
            continue
        fields[field_name] = dtype_name(value)
        if fields[field_name] is None:
            raise ConfigurationError(f"{field_name} must be one of {', '.join(DTYPES)} or None, got {value!r}")
    return dataclasses.replace(trainer or Fingerprint(engine="torch"), **fields) if fields else trainer


def dtype_name(value: object) -> str | None:
    """Return the name of a dtype ("bf16", "bfloat16", torch.bfloat16), None if it is none of DTYPES."""
    name = str(value).removeprefix("torch.")
    name = _SHORT.get(name, name)
    return name if name in DTYPES else None


@functools.cache
def _field_types() -> dict[str, Any]:
    return typing.get_type_hints(Fingerprint)


def _checked(name: str, hint: Any, value: Any) -> Any:
    """Return `value` as the field `name` stores it. Raises ConfigurationError if its type does not fit."""
    if typing.get_origin(hint) is types.UnionType:
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is not None:
        if isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item):
            return dict(sorted(value.items()))
        raise ConfigurationError(f"fingerprint: `{name}` must map names to text, got {value!r}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or isinstance(value, bool):
        raise ConfigurationError(f"fingerprint: `{name}` must be {hint.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"fingerprint: `{name}` must be finite, got {value!r}")
    return value
