"""Fingerprints: canonical JSON, digests and validation."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint, dtype_name, with_precision
from foreshock_service.replay.probes.environments import declared_precision


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


def test_precision_is_what_a_probe_replays_the_trainer_in() -> None:
    trainer = with_precision(None, {"master_dtype": torch.float32, "autocast": "bf16"})
    assert declared_precision(trainer) == {"master_dtype": "float32", "autocast": "bfloat16"}


def test_precision_joins_the_trainers_environment() -> None:
    known = Fingerprint("torch", engine_version="2.13", device_name="NVIDIA H200", master_dtype="float32")
    precision = {"master_dtype": "bfloat16", "autocast": None, "head_dtype": "float32"}
    assert with_precision(known, precision) == Fingerprint(
        "torch", engine_version="2.13", device_name="NVIDIA H200", master_dtype="bfloat16", head_dtype="float32"
    )


def test_nothing_is_declared_without_precision() -> None:
    known = Fingerprint("torch", top_k=5)
    assert with_precision(known, {"master_dtype": None, "autocast": None}) is known
    assert with_precision(None, {"master_dtype": None}) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [("fp32", "float32"), ("bf16", "bfloat16"), (torch.float16, "float16"), ("no", None), (None, None), (8, None)],
)
def test_names_of_dtypes(value: Any, name: str | None) -> None:
    assert dtype_name(value) == name


def test_unknown_dtype_names_the_argument() -> None:
    with pytest.raises(
        ConfigurationError, match="autocast must be one of float32, bfloat16, float16 or None, got 'fp8'"
    ):
        with_precision(None, {"autocast": "fp8"})
