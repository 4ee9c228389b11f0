"""Instruction sets of x86-64 CPUs that select kernels of torch, oneDNN, MKL and vLLM, lowest first.

A CPU has an instruction set if Linux lists its flags; a score's fingerprint names the one that its process was held to.
Sets that make no difference to bfloat16 and float32 products are omitted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foreshock.fingerprint import Fingerprint
from probes.hardware import cpu_flags

__all__ = ["InstructionSet", "instruction_set_of", "instruction_sets_of_cpu"]


@dataclass(frozen=True, slots=True)
class _Level:
    """The names of an instruction set in Linux, fingerprints and libraries.

    `flags`: Linux's flags that it adds to the next lower one. `feature`: its name in a fingerprint's `cpu_features`.
    `aten`, `onednn`, `mkl`: the values of the three variables. `hides`: prefixes of the entries of
    `torch.cpu.get_capabilities()` that are beyond it.
    """

    flags: tuple[str, ...]
    feature: str | None
    aten: str
    onednn: str
    mkl: str
    hides: tuple[str, ...]


class InstructionSet(enum.Enum):
    """An instruction set and all below it. The value is its name in settings and messages."""

    AVX2 = "avx2"
    AVX512 = "avx512"
    """The part of AVX-512 that every server CPU with AVX-512 has: F, BW, CD, DQ and VL."""
    AVX512_VNNI = "avx512_vnni"
    AVX512_BF16 = "avx512_bf16"
    AMX = "amx"
    """Tiles for bfloat16 products."""

    def includes(self, other: InstructionSet) -> bool:
        """Return True if a CPU with this instruction set has `other` too."""
        order = list(InstructionSet)
        return order.index(self) >= order.index(other)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that make torch, oneDNN and MKL select kernels of this instruction set."""
        level = _LEVELS[self]
        return {
            "ATEN_CPU_CAPABILITY": level.aten,
            "ONEDNN_MAX_CPU_ISA": level.onednn,
            "MKL_ENABLE_INSTRUCTIONS": level.mkl,
        }

    def visible(self, capabilities: Mapping[str, object]) -> dict[str, object]:
        """Return `capabilities` (of `torch.cpu.get_capabilities()`) as on a CPU with only this instruction set."""
        hides = _LEVELS[self].hides
        return {name: False if name.startswith(hides) else value for name, value in capabilities.items()}


_LEVELS = {
    InstructionSet.AVX2: _Level(
        ("avx2", "fma"), None, "avx2", "AVX2", "AVX2", ("avx512", "avx10", "amx", "avx_vnni", "avx_ne_convert")
    ),
    InstructionSet.AVX512: _Level(
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "avx512",
        "avx512",
        "AVX512_CORE",
        "AVX512",
        ("avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10", "amx"),
    ),
    InstructionSet.AVX512_VNNI: _Level(
        ("avx512_vnni",),
        "vnni",
        "avx512",
        "AVX512_CORE_VNNI",
        "AVX512_E1",
        ("avx512_bf16", "avx512_fp16", "avx10", "amx"),
    ),
    InstructionSet.AVX512_BF16: _Level(
        ("avx512_bf16",), "avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512_E3", ("avx512_fp16", "avx10", "amx")
    ),
    InstructionSet.AMX: _Level(
        ("amx_tile", "amx_bf16"), "amx_tile", "avx512", "AVX512_CORE_AMX", "AVX512_E4", ("amx_fp16", "avx10")
    ),
}


def instruction_sets_of_cpu(flags: Iterable[str] | None = None) -> tuple[InstructionSet, ...]:
    """Return the instruction sets of a CPU with these `flags` (None: this machine's), lowest first.

    Empty if the CPU is not an x86-64 CPU with AVX2, or if the system does not list its flags.
    """
    found = set(cpu_flags() if flags is None else flags)
    sets = []
    for instruction_set, level in _LEVELS.items():
        if not found.issuperset(level.flags):
            break
        sets.append(instruction_set)
    return tuple(sets)


def instruction_set_of(fingerprint: Fingerprint) -> InstructionSet | None:
    """Return the instruction set that made a score on a CPU; None if its fingerprint does not determine it.

    The fingerprint has it in `cpu_isa` (selected by torch) and in the flag `cpu_features` (read by the others); from
    AVX-512 on both are needed. They contradict each other if `ATEN_CPU_CAPABILITY` alone was set.
    """
    features = set(fingerprint.flags.get("cpu_features", "").split()) - {"none"}
    if fingerprint.cpu_isa == "AVX2" and not features:
        return InstructionSet.AVX2
    if fingerprint.cpu_isa != "AVX512" or "avx512" not in features:
        return None
    found = InstructionSet.AVX512
    for instruction_set, level in _LEVELS.items():
        if not instruction_set.includes(found):
            continue
        if level.feature not in features:
            break
        found = instruction_set
    return found
