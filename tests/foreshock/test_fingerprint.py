"""Fingerprints: canonical JSON, digests and validation."""

from __future__ import annotations

import json

import pytest

from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint


def test_equal_fingerprints_have_equal_digest() -> None:
    one = Fingerprint("vllm", flags={"b": "1", "a": "2"}, temperature=1, top_k=-1)
    two = Fingerprint.from_json(
        json.dumps({"top_k": -1, "temperature": 1.0, "flags": {"a": "2", "b": "1"}, "engine": "vllm"})
    )
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest() == two.digest()
    assert one.digest() != Fingerprint("vllm", temperature=1.0).digest()


def test_unknown_field_of_fingerprint_is_ignored() -> None:
    assert Fingerprint.from_json('{"engine":"vllm","colour":"red"}') == Fingerprint("vllm")


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "{}", '{"engine":1}', '{"engine":"v","top_k":1.5}', '{"engine":"v","flags":{"a":1}}',
     '{"engine":"v","temperature":true}', '{"engine":"v","temperature":NaN}', '{"engine":""}'],
)  # fmt: skip
def test_invalid_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        Fingerprint.from_json(text)
