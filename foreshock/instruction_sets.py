"""The instruction sets of x86-64 CPUs between which kernels of torch, oneDNN, MKL and vLLM choose, lowest first.

A fingerprint tells which one made a score on a CPU, and whose kernels MKL used: each changes the last bits of a score.
"""

from __future__ import annotations

import enum

from foreshock.fingerprint import Fingerprint

__all__ = [
    "CHOOSING_VARIABLES",
    "InstructionSet",
    "MklKernels",
    "instruction_set_of",
    "mkl_kernels_of",
]

# Environment variables by which kernels are chosen by hand; a fingerprint records those that were set.
CHOOSING_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


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

    @property
    def title(self) -> str:
        """The name in texts."""
        return _TITLES[self]


class MklKernels(enum.Enum):
    """The kernels that MKL computes float32 products with.

    On an AMD CPU MKL has kernels of its own for every instruction set; they cannot be selected on an Intel CPU. The
    SSE4.2 kernels are the nearest to them: with torch 2.13 they give the same bits in attention over bfloat16 up to 192
    keys, and differ in the last bits beyond that and in float32 products.
    """

    INTEL = "intel"
    """The kernels of the instruction set, on an Intel CPU."""
    AMD = "amd"
    SSE4_2 = "sse4.2"
    """The SSE4.2 kernels, on an Intel CPU that is held to them."""


_TITLES = {
    InstructionSet.AVX2: "AVX2",
    InstructionSet.AVX512: "AVX-512",
    InstructionSet.AVX512_VNNI: "AVX-512 with VNNI",
    InstructionSet.AVX512_BF16: "AVX-512 with bfloat16",
    InstructionSet.AMX: "AVX-512 with AMX",
}
# The name of what each adds to the one below, in a fingerprint's `cpu_features`.
_FEATURES = {
    InstructionSet.AVX512: "avx512",
    InstructionSet.AVX512_VNNI: "vnni",
    InstructionSet.AVX512_BF16: "avx512_bf16",
    InstructionSet.AMX: "amx_tile",
}


def instruction_set_of(fingerprint: Fingerprint) -> InstructionSet | None:
    """Return the instruction set that made a score on a CPU; None if its fingerprint does not tell.

    It is in `cpu_isa` (what torch chose) and in the flag `cpu_features` (what others choose by); from AVX-512 on both
    are needed. The two contradict each other if only torch was held, by `ATEN_CPU_CAPABILITY` alone.
    """
    features = set(fingerprint.flags.get("cpu_features", "").split()) - {"none"}
    if fingerprint.cpu_isa == "AVX2" and not features:
        return InstructionSet.AVX2
    if fingerprint.cpu_isa != "AVX512" or _FEATURES[InstructionSet.AVX512] not in features:
        return None
    found = InstructionSet.AVX512
    for instruction_set, feature in _FEATURES.items():
        if feature not in features:
            break
        found = instruction_set
    return found


def mkl_kernels_of(fingerprint: Fingerprint) -> MklKernels | None:
    """Return whose kernels MKL used for a score on a CPU: its flag, else by the CPU's maker; None if unknown."""
    kernels = fingerprint.flags.get("mkl_kernels")
    if kernels in {each.value for each in MklKernels}:
        return MklKernels(kernels)
    maker = (fingerprint.device_name or "").split(" ")[0]
    return {"AMD": MklKernels.AMD, "Intel(R)": MklKernels.INTEL}.get(maker)
