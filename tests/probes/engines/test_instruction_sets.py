"""Tests of instruction sets: of a CPU, from its flags; of a score, from its fingerprint."""

from __future__ import annotations

import pytest

from foreshock.environment import InstructionSet, instruction_set_of
from foreshock.fingerprint import Fingerprint
from foreshock_probes.engines.environment import instruction_sets_of_cpu, visible_capabilities

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
