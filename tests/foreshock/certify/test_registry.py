"""The registry: what it holds, and which of its certificates are near to a run's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foreshock.certify.certificate import SCHEMA, Certificate
from foreshock.certify.compare import compare
from foreshock.certify.registry import REGISTRY, engine_of, entries, entry_of, near
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint
from foreshock.model_kind import known_model_kind
from foreshock.scorers import ENGINE_DECODE
from tests.foreshock.certify.making import certificate, row

ENGINE = Fingerprint(
    engine="vllm",
    engine_version="0.32.0",
    dtype="bfloat16",
    device_name="AMD EPYC",
    cpu_isa="AVX512",
    flags={"cpu_features": "avx512 avx512_bf16 vnni", "mkl_kernels": "amd", "enforce_eager": "true"},
)


def made(release: str = "0.32.0", **fields: Any) -> Certificate:
    engine = replace(ENGINE, engine_version=release, **fields)
    return certificate(row(f"trainer/{ENGINE_DECODE}", 0.01), fingerprints={ENGINE_DECODE: engine.to_dict()})


def releases(found: Sequence[Certificate]) -> list[str]:
    return [str(engine.engine_version) for each in found if (engine := engine_of(each)) is not None]


def test_certificates_of_the_release_are_near() -> None:
    among = [made("0.31.0"), made("0.32.0"), made("0.32.0"), made("0.33.0")]
    assert near(ENGINE, "dense", among) == among[1:3]


@pytest.mark.parametrize(
    ("release", "nearest"),
    [("0.31.0", ["0.31.0"]), ("0.32.5", ["0.32.1"]), ("0.33.1", ["0.32.1"]), ("0.30.0", ["0.31.0"])],
)
def test_nearest_release_counts_within_one_minor(release: str, nearest: list[str]) -> None:
    among = [made("0.31.0"), made("0.32.0"), made("0.32.1")]
    assert releases(near(replace(ENGINE, engine_version=release), "dense", among)) == nearest


@pytest.mark.parametrize("release", ["0.29.0", "0.34.0", "1.32.0", "nightly", None])
def test_no_far_or_unknown_release_is_near(release: str | None) -> None:
    assert not near(replace(ENGINE, engine_version=release), "dense", [made("0.31.0"), made("0.32.0")])


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "sglang"},
        {"dtype": "float32"},
        {"dtype": None},
        {"device_name": "NVIDIA H200", "flags": {}, "cpu_isa": None},
        {"cpu_isa": "AVX2", "flags": {"cpu_features": "none", "mkl_kernels": "amd"}},
        {"cpu_isa": None, "flags": {}},
        {"flags": {**ENGINE.flags, "mkl_kernels": "intel"}},
        {"flags": {**ENGINE.flags, "enforce_eager": "false"}},
        {"flags": {**ENGINE.flags, "kv_cache_dtype": "fp8"}},
        {"flags": {**ENGINE.flags, "ONEDNN_MAX_CPU_ISA": "AVX2"}},
        {"quantization": "fp8"},
    ],
)
def test_nothing_of_another_engine_dtype_hardware_or_setting_is_near(other: dict[str, Any]) -> None:
    among = [made(quantization="none", flags={**ENGINE.flags, "kv_cache_dtype": "auto"})]
    assert near(ENGINE, "dense", among)
    assert not near(replace(ENGINE, **other), "dense", among)


def test_kind_of_model_must_be_known_and_equal() -> None:
    assert not near(ENGINE, "moe", [made()])
    assert not near(ENGINE, None, [made()])
    assert not near(ENGINE, "dense", [replace(made(), model_kind=None)])
    assert not near(ENGINE, "dense", [replace(made(), fingerprints={})])


def test_entry_has_no_tokens_and_no_sums_of_prompts() -> None:
    whole = replace(made(), token_sets={"sha256:0": "AAAA"})
    entry = entry_of(whole)
    assert entry.token_sets == {}
    assert all(size.prompts == () for each in entry.rows for size in each.sizes)
    assert entry.rows[0].sizes[0].k3 == whole.rows[0].sizes[0].k3
    assert entry_of(entry) == entry
    with pytest.raises(ConfigurationError, match="one of the registry"):
        compare(whole, entry)


def test_every_certificate_of_the_registry_is_whole_and_named_after_its_content() -> None:
    found = dict(zip(sorted(REGISTRY.glob("*.json")), entries(), strict=True))
    assert found
    for path, each in found.items():
        engine = engine_of(each)
        assert engine is not None
        assert path.name.startswith(f"{engine.engine}-{engine.engine_version}-{engine.dtype}-")
        assert path.stem.endswith(f"-{each.model}")
        assert (each.schema, each.ended) == (SCHEMA, "complete")
        assert each == entry_of(each)
        assert {each.verdict for each in each.rows} <= {"identical", "rounding", "different"}
        assert each in near(engine, known_model_kind(each.model_kind), entries())
