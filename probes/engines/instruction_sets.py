"""Environment variables that hold a process to an instruction set, and the instruction sets of a CPU.

A CPU has an instruction set if Linux lists its flags; a score's fingerprint names the one that its process was held to.
Sets that make no difference to bfloat16 and float32 products are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foreshock.hardware import cpu_flags
from foreshock.instruction_sets import InstructionSet

__all__ = ["instruction_sets_of_cpu", "kernel_variables", "visible_capabilities"]


@dataclass(frozen=True, slots=True)
class _Level:
    """The names of an instruction set in Linux and in libraries.

    `flags`: Linux's flags that it adds to the next lower one. `aten`, `onednn`, `mkl`: the values of the three
    variables. `hides`: prefixes of the entries of `torch.cpu.get_capabilities()` that are beyond it.
    """

    flags: tuple[str, ...]
    aten: str
    onednn: str
    mkl: str
    hides: tuple[str, ...]


_LEVELS = {
    InstructionSet.AVX2: _Level(
        ("avx2", "fma"), "avx2", "AVX2", "AVX2", ("avx512", "avx10", "amx", "avx_vnni", "avx_ne_convert")
    ),
    InstructionSet.AVX512: _Level(
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "avx512",
        "AVX512_CORE",
        "AVX512",
        ("avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10", "amx"),
    ),
    InstructionSet.AVX512_VNNI: _Level(
        ("avx512_vnni",), "avx512", "AVX512_CORE_VNNI", "AVX512_E1", ("avx512_bf16", "avx512_fp16", "avx10", "amx")
    ),
    InstructionSet.AVX512_BF16: _Level(
        ("avx512_bf16",), "avx512", "AVX512_CORE_BF16", "AVX512_E3", ("avx512_fp16", "avx10", "amx")
    ),
    InstructionSet.AMX: _Level(
        ("amx_tile", "amx_bf16"), "avx512", "AVX512_CORE_AMX", "AVX512_E4", ("amx_fp16", "avx10")
    ),
}


def kernel_variables(instruction_set: InstructionSet) -> dict[str, str]:
    """Return the environment variables that make torch, oneDNN and MKL select kernels of this instruction set."""
    level = _LEVELS[instruction_set]
    return {
        "ATEN_CPU_CAPABILITY": level.aten,
        "ONEDNN_MAX_CPU_ISA": level.onednn,
        "MKL_ENABLE_INSTRUCTIONS": level.mkl,
    }


def visible_capabilities(instruction_set: InstructionSet, capabilities: Mapping[str, object]) -> dict[str, object]:
    """Return `capabilities` (of `torch.cpu.get_capabilities()`) as they are on a CPU with no more than this."""
    hides = _LEVELS[instruction_set].hides
    return {name: False if name.startswith(hides) else value for name, value in capabilities.items()}


def instruction_sets_of_cpu(flags: Iterable[str] | None = None) -> tuple[InstructionSet, ...]:
    """Return the instruction sets of a CPU with these `flags` (None: this machine's), lowest first.

    There are none if it is no x86-64 CPU with AVX2, or if the system does not list its flags.
    """
    found = set(cpu_flags() if flags is None else flags)
    sets = []
    for instruction_set, level in _LEVELS.items():
        if not found.issuperset(level.flags):
            break
        sets.append(instruction_set)
    return tuple(sets)
