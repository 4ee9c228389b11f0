"""Tests of the environment that an engine's process is held to."""

import os
from collections.abc import Callable

import pytest

from foreshock import process_fingerprint
from foreshock.environment import Environment, InstructionSet, MklKernels, instruction_set_of
from foreshock.fingerprint import Fingerprint
from foreshock.process_fingerprint import hand_set_variables
from foreshock_probes.engines import environment
from foreshock_probes.engines.environment import (
    AS_IT_IS,
    VARIABLE,
    EngineEnvironment,
    EnvironmentUnavailableError,
    available_instruction_sets,
    instruction_sets_of_cpu,
    offered_environments,
    visible_capabilities,
)
from foreshock_probes.engines.process import process_variables
from tests.probes.held import fingerprint_of_this_process, held

AVAILABLE = available_instruction_sets()
FEATURES = {
    InstructionSet.AVX2: ("AVX2", "none"),
    InstructionSet.AVX512: ("AVX512", "avx512"),
    InstructionSet.AVX512_VNNI: ("AVX512", "avx512 vnni"),
    InstructionSet.AVX512_BF16: ("AVX512", "avx512 avx512_bf16 vnni"),
    InstructionSet.AMX: ("AVX512", "amx_tile avx512 avx512_bf16 vnni"),
}
FakeCpu = Callable[[str, tuple[InstructionSet, ...]], None]
RECORDED_ON_AMD = EngineEnvironment(InstructionSet.AVX2, MklKernels.AMD)


@pytest.fixture
def fake_cpu(monkeypatch: pytest.MonkeyPatch) -> FakeCpu:
    """Make the CPU one of the given vendor and instruction sets, held to nothing."""

    def set_cpu(vendor: str, sets: tuple[InstructionSet, ...]) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        for module in (environment, process_fingerprint):
            monkeypatch.setattr(module, "cpu_vendor", lambda: vendor)
        monkeypatch.setattr(environment, "instruction_sets_of_cpu", lambda: sets)

    return set_cpu


def bfloat16_products_use_onednn() -> bool:
    """Return True if oneDNN reports bfloat16 products on this CPU; it does not without AVX-512."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(offered_environments()))
def test_process_held_to_an_offered_environment_has_its_fingerprint_and_name(name: str) -> None:
    environment = offered_environments()[name]
    assert environment.instruction_set is not None
    with held(environment) as process:
        fingerprint = process.call(fingerprint_of_this_process)
        of_onednn = process.call(bfloat16_products_use_onednn)
        inside = process.call(available_instruction_sets)
    assert (fingerprint.cpu_isa, fingerprint.flags["cpu_features"]) == FEATURES[environment.instruction_set]
    assert set(fingerprint.flags) <= {"cpu_features", "mkl_kernels"}
    assert EngineEnvironment.of_fingerprint(fingerprint).instruction_set is environment.instruction_set
    assert of_onednn == (environment.instruction_set is not InstructionSet.AVX2)
    assert inside == AVAILABLE[: AVAILABLE.index(environment.instruction_set) + 1]
    assert Environment.of_fingerprint(fingerprint).offer_names()[0] == name


def test_unavailable_instruction_set_is_refused_by_name(fake_cpu: FakeCpu) -> None:
    fake_cpu("GenuineIntel", (InstructionSet.AVX2, InstructionSet.AVX512))
    with pytest.raises(EnvironmentUnavailableError, match=r"'amx'.*: avx2, avx512$"):
        process_variables(EngineEnvironment(InstructionSet.AMX))
    fake_cpu("", ())
    with pytest.raises(EnvironmentUnavailableError, match=r"'avx2'.*: none$"):
        EngineEnvironment(InstructionSet.AVX2).variables()


def test_error_for_unknown_instruction_set_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx1024")
    with pytest.raises(EnvironmentUnavailableError, match=r"must be one of avx2, .*, amx, got 'avx1024'"):
        process_variables()


def test_engines_inherit_the_instruction_set_as_a_bound(fake_cpu: FakeCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cpu("GenuineIntel", tuple(InstructionSet))
    assert VARIABLE not in process_variables()
    monkeypatch.setenv(VARIABLE, "avx512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    inherited = process_variables()
    assert (inherited[VARIABLE], inherited["ONEDNN_MAX_CPU_ISA"]) == ("avx512", "AVX512_CORE")
    assert process_variables(EngineEnvironment(InstructionSet.AVX2))[VARIABLE] == "avx2"
    with pytest.raises(EnvironmentUnavailableError, match=r"avx2, avx512$"):
        process_variables(EngineEnvironment(InstructionSet.AMX))


def test_variables_set_by_hand_are_recorded_and_the_instruction_set_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert hand_set_variables() == {}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert hand_set_variables() == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    mixed = Fingerprint(engine="torch", cpu_isa="AVX512", flags={"cpu_features": "avx512", **hand_set_variables()})
    assert EngineEnvironment.of_fingerprint(mixed) == AS_IT_IS


@pytest.mark.parametrize(
    ("device", "flags", "kernels"),
    [
        ("AMD EPYC 7B13", {}, MklKernels.AMD),
        ("Intel(R) Xeon(R) Processor", {}, MklKernels.INTEL),
        ("Intel(R) Xeon(R) Processor", {"mkl_kernels": "sse4.2"}, MklKernels.SSE4_2),
        ("unknown CPU", {}, None),
        (None, {"mkl_kernels": "of the future"}, None),
    ],
)
def test_fingerprint_has_mkl_kernels(device: str | None, flags: dict[str, str], kernels: MklKernels | None) -> None:
    made_by = Fingerprint(engine="torch", device_name=device, cpu_isa="AVX2", flags=flags)
    assert EngineEnvironment.of_fingerprint(made_by) == EngineEnvironment(InstructionSet.AVX2, kernels)


@pytest.mark.parametrize(
    ("vendor", "sets", "nearest"),
    [
        ("AuthenticAMD", (InstructionSet.AVX2,), EngineEnvironment(InstructionSet.AVX2)),
        ("GenuineIntel", tuple(InstructionSet), EngineEnvironment(InstructionSet.AVX2, MklKernels.SSE4_2)),
        ("", (), AS_IT_IS),
    ],
)
def test_nearest_environment_is_available(
    fake_cpu: FakeCpu, vendor: str, sets: tuple[InstructionSet, ...], nearest: EngineEnvironment
) -> None:
    fake_cpu(vendor, sets)
    found = RECORDED_ON_AMD.nearest()
    assert found == nearest
    assert EngineEnvironment.of_variables(found.variables()) == found


def test_nearest_environment_is_the_highest_available_one_on_a_lower_cpu(fake_cpu: FakeCpu) -> None:
    fake_cpu("GenuineIntel", (InstructionSet.AVX2, InstructionSet.AVX512))
    recorded = EngineEnvironment(InstructionSet.AMX, MklKernels.INTEL)
    assert recorded.nearest() == EngineEnvironment(InstructionSet.AVX512)


def test_fingerprint_of_this_process_has_the_environment_of_its_variables() -> None:
    name = os.environ.get(VARIABLE)
    fingerprint = EngineEnvironment.of_fingerprint(fingerprint_of_this_process())
    assert fingerprint.instruction_set is (InstructionSet(name) if name else (AVAILABLE or (None,))[-1])


def test_machine_offers_the_environments_that_it_can_be_held_to_by_name(fake_cpu: FakeCpu) -> None:
    fake_cpu("GenuineIntel", (InstructionSet.AVX2, InstructionSet.AVX512))
    assert list(offered_environments()) == ["avx2", "avx2-sse4.2", "avx512", "avx512-sse4.2"]
    assert offered_environments()["avx2-sse4.2"] == EngineEnvironment(InstructionSet.AVX2, MklKernels.SSE4_2)
    fake_cpu("AuthenticAMD", (InstructionSet.AVX2,))
    assert offered_environments() == {"avx2-amd": EngineEnvironment(InstructionSet.AVX2)}


AVX2 = {"sse4_2", "avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
EVERYTHING = AVX512 | {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (set(), ""),
        ({"sse4_2", "avx"}, ""),
        ({"asimd", "sve", "bf16"}, ""),
        (AVX2, "avx2"),
        (AVX512 - {"avx512vl"}, "avx2"),
        (AVX512, "avx2 avx512"),
        (AVX512 | {"avx512_vnni"}, "avx2 avx512 avx512_vnni"),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx2 avx512 avx512_vnni avx512_bf16"),
        (EVERYTHING, "avx2 avx512 avx512_vnni avx512_bf16 amx"),
    ],
)
def test_instruction_sets_of_a_cpu_are_read_from_its_flags(flags: set[str], names: str) -> None:
    assert [each.value for each in instruction_sets_of_cpu(flags)] == names.split()


@pytest.mark.parametrize(
    ("cpu_isa", "features", "found"),
    [
        ("AVX2", None, InstructionSet.AVX2),
        ("AVX2", "none", InstructionSet.AVX2),
        ("AVX512", "avx512", InstructionSet.AVX512),
        ("AVX512", "avx512 vnni", InstructionSet.AVX512_VNNI),
        ("AVX512", "avx512 avx512_bf16 vnni", InstructionSet.AVX512_BF16),
        ("AVX512", "amx_fp16 amx_tile avx512 avx512_bf16 vnni", InstructionSet.AMX),
        ("AVX512", None, None),
        ("AVX2", "avx512 vnni", None),
        ("DEFAULT", "none", None),
        ("SVE256", None, None),
        (None, None, None),
    ],
)
def test_instruction_set_of_a_score_is_read_from_its_fingerprint(
    cpu_isa: str | None, features: str | None, found: InstructionSet | None
) -> None:
    flags = {} if features is None else {"cpu_features": features}
    assert instruction_set_of(Fingerprint(engine="torch", cpu_isa=cpu_isa, flags=flags)) is found


def test_instruction_set_includes_the_lower_ones() -> None:
    order = list(InstructionSet)
    for index, each in enumerate(order):
        assert [each.includes(other) for other in order] == [other <= index for other in range(len(order))]


def test_capabilities_beyond_the_instruction_set_are_hidden() -> None:
    everything: dict[str, object] = dict.fromkeys(
        ("sse4_2", "avx2", "fma3", "avx512_f", "avx512_vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_fp16"), True
    )
    everything["cpu_name"] = "Xeon"
    hidden = {
        each.value: {name for name, value in visible_capabilities(each, everything).items() if value is False}
        for each in InstructionSet
    }
    assert hidden == {
        "avx2": {"avx512_f", "avx512_vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_fp16"},
        "avx512": {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_fp16"},
        "avx512_vnni": {"avx512_bf16", "amx_tile", "amx_fp16"},
        "avx512_bf16": {"amx_tile", "amx_fp16"},
        "amx": {"amx_fp16"},
    }
