"""The instruction sets of x86 processors that matter to products of bfloat16, and how a process is held to one.

oneDNN, MKL, torch's own kernels and numba each choose by themselves, so each is told; all read the environment when
they are loaded, so a set is held in a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

__all__ = ["InstructionSet", "available"]


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set, the function of torch.cpu that asks for it, and the variables that hold a process to it."""

    name: str
    supported_by: str
    variables: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with the variables."""
        return {**os.environ, **self.variables}


def _avx512(name: str, supported_by: str, one_dnn: str) -> InstructionSet:
    variables = {"ONEDNN_MAX_CPU_ISA": one_dnn, "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"}
    return InstructionSet(name, supported_by, variables)


# From the least to the greatest.
_SETS = (
    InstructionSet(
        "avx2",
        "_is_avx2_supported",
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": "",
        },
    ),
    _avx512("avx512", "_is_avx512_supported", "AVX512_CORE"),
    _avx512("avx512_bf16", "_is_avx512_bf16_supported", "AVX512_CORE_BF16"),
    _avx512("amx", "_is_amx_tile_supported", "AVX512_CORE_AMX"),
)


def available() -> tuple[InstructionSet, ...]:
    """The sets that this processor has, the greatest last; none on a processor that is not an x86 with AVX2."""
    return tuple(one for one in _SETS if bool(getattr(torch.cpu, one.supported_by, bool)()))
