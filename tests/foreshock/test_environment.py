"""Two environments differ in what their fingerprints tell, and in what they do not tell."""

import json
from typing import Any

import pytest

from examples.tiny_rl.record import RECORDED
from foreshock.environment import CPU, Environment, InstructionSet, device_slug, differences
from foreshock.fingerprint import Fingerprint

FEATURES = {
    InstructionSet.AVX2: ("AVX2", "none"),
    InstructionSet.AVX512: ("AVX512", "avx512"),
    InstructionSet.AVX512_BF16: ("AVX512", "avx512 avx512_bf16 vnni"),
    InstructionSet.AMX: ("AVX512", "amx_tile avx512 avx512_bf16 vnni"),
}


def on_cpu(
    instruction_set: InstructionSet = InstructionSet.AVX2, mkl: str = "intel", flags: dict[str, str] | None = None,
    **known: Any,
) -> Environment:  # fmt: skip
    """A CPU's environment, as a worker's fingerprint tells it."""
    isa, features = FEATURES[instruction_set]
    fields = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "cpu_isa": isa,
        "device_name": "Intel(R) Xeon(R) Processor",
        "driver": "Linux 6.1",
        "flags": {"cpu_features": features, "mkl_kernels": mkl, **(flags or {})},
        **known,
    }
    return Environment.of_fingerprint(Fingerprint(**fields))


def on_gpu(device: str | None = "NVIDIA H200", driver: str | None = "580.1", **known: Any) -> Environment:
    fields = {"engine": "vllm", "engine_version": "0.32.0", "device_name": device, "driver": driver, **known}
    return Environment.of_fingerprint(Fingerprint(**fields))


def titles(earlier: Environment | None, later: Environment | None, *, same_engine: bool = True) -> list[str]:
    return [each.title for each in differences(earlier, later, same_engine=same_engine)]


def test_equal_environments_do_not_differ() -> None:
    for environment in (on_cpu(), on_cpu(InstructionSet.AMX), on_gpu()):
        assert differences(environment, environment, same_engine=True) == ()


def test_instruction_sets_are_named_in_words() -> None:
    (found,) = differences(on_cpu(), on_cpu(InstructionSet.AVX512_BF16), same_engine=True)
    assert found.is_known
    assert found.words("at sampling", "in the replay") == (
        "the CPU's instruction set: AVX2 at sampling, AVX-512 with bfloat16 in the replay"
    )


def test_mkl_kernels_are_distinguished_by_vendor() -> None:
    assert titles(on_cpu(mkl="amd"), on_cpu(mkl="sse4.2")) == ["MKL's kernels, chosen by the CPU's maker"]


def test_two_cpus_with_the_same_kernels_are_one_environment() -> None:
    assert titles(on_cpu(device_name="Intel(R) Xeon(R) 6975P"), on_cpu(driver="Linux 5.10")) == []


def test_devices_and_drivers_of_gpus_count() -> None:
    assert titles(on_gpu("NVIDIA H100 80GB HBM3"), on_gpu()) == ["the device"]
    assert titles(on_cpu(), on_gpu()) == ["the device"]
    assert titles(on_gpu(driver="570.2"), on_gpu()) == ["the GPU's driver"]
    # The CPU beside a GPU does not compute the scores.
    assert titles(on_gpu(cpu_isa="AVX2"), on_gpu(cpu_isa="AVX512")) == []


def test_missing_fields_are_unknown_and_not_equal() -> None:
    nothing = Environment.of_fingerprint(Fingerprint(engine="vllm", engine_version="0.32.0"))
    for known in (on_cpu(), on_gpu()):
        (found,) = differences(nothing, known, same_engine=True)
        assert not found.is_known
        assert found.words("at sampling", "in the replay").startswith("the device: unknown at sampling, ")
    assert titles(nothing, nothing) == ["the device"]
    assert titles(None, on_gpu()) == ["the device", "the engine"]
    # From AVX-512 on, the instruction set alone does not tell which kernels vLLM chose.
    old = Environment.of_fingerprint(
        Fingerprint(engine="vllm", engine_version="0.32.0", device_name="Intel(R) Xeon(R)", cpu_isa="AVX512")
    )
    assert titles(old, on_cpu(InstructionSet.AVX512)) == ["the CPU's instruction set"]


def test_engines_count_only_between_scores_of_one_engine() -> None:
    other = on_cpu(engine_version="0.31.0")
    assert titles(other, on_cpu()) == ["the version of vllm"]
    assert titles(other, on_cpu(), same_engine=False) == []
    assert titles(on_cpu(engine="sglang"), on_cpu()) == ["the engine"]
    assert titles(on_cpu(engine_version=None), on_cpu()) == ["the version of vllm"]
    assert titles(on_cpu(dtype="float16"), on_cpu(dtype="bfloat16")) == ["the engine's dtype"]
    # What an older fingerprint does not tell of the kernels is no difference.
    assert titles(on_cpu(), on_cpu(dtype="bfloat16", attention_backend="CPU_ATTN")) == []


def test_flags_that_choose_kernels_count_and_those_of_the_batch_do_not() -> None:
    eager = on_gpu(flags={"enforce_eager": "true", "prefix_caching": "false", "max_num_batched_tokens": "1"})
    compiled = on_gpu(flags={"enforce_eager": "false", "prefix_caching": "true", "max_num_batched_tokens": "2"})
    assert titles(compiled, eager) == ["eager mode (no torch.compile, no CUDA graphs)"]
    assert titles(on_cpu(flags={"MKL_CBWR": "AVX2"}), on_cpu(), same_engine=False) == ["MKL_CBWR"]


def test_gpu_without_flags_is_recognised_by_its_name() -> None:
    for name in ("AMD EPYC", "Intel(R) Core(TM) i7", "Neoverse-V2", "unknown CPU"):
        assert Environment.of_fingerprint(Fingerprint(engine="vllm", device_name=name)).device == CPU
    for name in ("NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X", "Intel(R) Data Center GPU Max 1550"):
        assert Environment.of_fingerprint(Fingerprint(engine="vllm", device_name=name)).device == name


def test_the_recorded_run_was_sampled_on_a_cpu_of_amd_with_avx2() -> None:
    manifest = json.loads((RECORDED / "manifest.json").read_text())
    recorded = Environment.of_fingerprint(Fingerprint.from_dict(manifest["engine_fingerprint"]))
    assert recorded.describe() == "a CPU with AVX2 and AMD's MKL kernels"
    assert recorded.offer_names() == ("avx2-amd", "avx2-sse4.2", "avx2")
    assert titles(recorded, on_cpu(InstructionSet.AMX)) == [
        "the CPU's instruction set",
        "MKL's kernels, chosen by the CPU's maker",
    ]


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        (on_cpu(InstructionSet.AMX), ("amx",)),
        (on_cpu(mkl="sse4.2"), ("avx2-sse4.2", "avx2-amd", "avx2")),
        (on_cpu(device_name="unknown CPU", mkl="?"), ("avx2", "avx2-amd", "avx2-other")),
        (on_gpu("NVIDIA H200"), ("nvidia-h200",)),
        (Environment(), ()),
        (Environment(device=CPU, instruction_set="sve256"), ()),
    ],
)
def test_an_environment_is_asked_for_by_names_of_workers(environment: Environment, names: tuple[str, ...]) -> None:
    assert environment.offer_names() == names


def test_hardware_is_described_in_words() -> None:
    assert on_cpu(InstructionSet.AMX).describe() == "a CPU with AVX-512 with AMX"
    assert on_cpu(mkl="sse4.2").describe() == "a CPU with AVX2 and SSE4.2 MKL kernels"
    assert on_gpu().describe() == "NVIDIA H200"
    assert Environment().describe() == "an unknown device"
    assert device_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
