"""The setup of a shard: all that its attributes say about what sampled and what trained.

It has every field of the fingerprints. `foreshock/environment.py` has those that make two scores comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreshock.api.runs import Plain
from foreshock.digests import canonical_json, digest_of_bytes
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes

# They differ from step to step in every run.
_OF_A_STEP = frozenset({"weights_version", "weights_digest", "batch_composition"})
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logprobs_mode", "length_cap", "trainer_policy")

Setup = Mapping[str, Any]
"""`engine`, `trainer` and `sampling`, each with its known fields; a part that is not known is absent."""


@dataclass(frozen=True, slots=True)
class StoredSetup:
    """A setup as canonical JSON, and the digest of it."""

    digest: str
    text: str


@dataclass(frozen=True, slots=True)
class SetupDifference:
    """A field in which two sets of setups differ, such as `engine.dtype`; the values of each, sorted as text.

    A value that is no text, number or bool is given as JSON.
    """

    name: str
    before: tuple[Plain, ...]
    after: tuple[Plain, ...]


def setup_of(attributes: BatchAttributes) -> StoredSetup:
    """Return the setup of a shard with these attributes."""
    parts: dict[str, dict[str, Any]] = {
        "engine": _lasting(attributes.engine_fingerprint),
        "trainer": _lasting(attributes.trainer_fingerprint),
        "sampling": {name: value for name in _SAMPLING if (value := getattr(attributes, name)) is not None},
    }
    text = canonical_json({name: fields for name, fields in parts.items() if fields})
    return StoredSetup(digest_of_bytes(text.encode()), text)


def differences(before: Sequence[Setup], after: Sequence[Setup]) -> tuple[SetupDifference, ...]:
    """Return the fields in which two sets of setups differ, by name.

    A field, or a whole part, that one side does not know is no difference: it was not logged there.
    """
    old, new = [_fields(each) for each in before], [_fields(each) for each in after]
    names = sorted({name for fields in (*old, *new) for name in fields})
    found = []
    for name in names:
        values_before, values_after = _values(old, name), _values(new, name)
        if values_before and values_after and values_before != values_after:
            found.append(SetupDifference(name, tuple(values_before.values()), tuple(values_after.values())))
    return tuple(found)


def _lasting(fingerprint: Fingerprint | None) -> dict[str, Any]:
    known = {} if fingerprint is None else fingerprint.to_dict()
    return {name: value for name, value in known.items() if name not in _OF_A_STEP}


def _fields(setup: Setup) -> dict[str, Any]:
    """Return the fields by dotted name; the entries of a mapping such as `flags` are fields of their own."""
    found: dict[str, Any] = {}
    for part, fields in setup.items():
        for name, value in fields.items():
            if isinstance(value, Mapping):
                found |= {f"{part}.{name}.{key}": entry for key, entry in value.items()}
            else:
                found[f"{part}.{name}"] = value
    return found


def _values(setups: Sequence[Mapping[str, Any]], name: str) -> dict[str, Plain]:
    """Return the different values of a field by their JSON text, in its order."""
    values = {canonical_json(fields[name]): fields[name] for fields in setups if fields.get(name) is not None}
    return {text: value if isinstance(value, Plain) else text for text, value in sorted(values.items())}
