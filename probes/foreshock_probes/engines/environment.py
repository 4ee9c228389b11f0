"""The environment of an engine's process: the whole CPU, or the CPU held to a lower instruction set.

The same weights and tokens give different log-probs under different instruction sets: kernels sum in another order and
round differently, and vLLM has separate builds for AVX2, AVX-512 and AVX-512 with bfloat16. A replay equals the logged
values bit for bit only under the instruction set that logged them. A CPU with more instructions is held to that set:

- `ATEN_CPU_CAPABILITY` selects torch's own kernels, `ONEDNN_MAX_CPU_ISA` oneDNN's (torch and vLLM have a copy each),
  `MKL_ENABLE_INSTRUCTIONS` MKL's, which torch uses for float32 products and in attention;
- vLLM selects its build and its attention by `torch.cpu.get_capabilities()`, which no variable changes:
  `hold_this_process` replaces it, so that it omits what `FORESHOCK_INSTRUCTION_SET` excludes.

On Intel CPUs a held process computes the same bits as a CPU without the further instructions. MKL also selects by the
CPU's vendor, see `MklKernels`. A CPU has an instruction set if Linux lists its flags. Sets that do not change bfloat16
and float32 products are omitted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foreshock.environment import (
    CHOOSING_VARIABLES,
    InstructionSet,
    MklKernels,
    environment_name,
    instruction_set_of,
    mkl_kernels_of,
)
from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.process_fingerprint import MKL_SSE4_2, MKL_VARIABLE, cpu_flags, cpu_vendor, mkl_kernels

VARIABLE = "FORESHOCK_INSTRUCTION_SET"


class EnvironmentUnavailableError(ForeshockError):
    """This machine cannot be held to the environment; the message lists the possible ones."""


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The instruction set and the MKL kernels that a process is held to; None if it uses the whole CPU."""

    instruction_set: InstructionSet | None = None
    mkl: MklKernels | None = None

    @classmethod
    def of_variables(cls, variables: Mapping[str, str] | None = None) -> EngineEnvironment:
        """Return the environment that `variables` (None: this process's) select.

        Raises EnvironmentUnavailableError if FORESHOCK_INSTRUCTION_SET is not an instruction set.
        """
        given = os.environ if variables is None else variables
        name = given.get(VARIABLE, "")
        if not name:
            return AS_IT_IS
        if name not in {each.value for each in InstructionSet}:
            names = ", ".join(each.value for each in InstructionSet)
            raise EnvironmentUnavailableError(f"{VARIABLE} must be one of {names}, got {name!r}")
        return cls(InstructionSet(name), MklKernels.SSE4_2 if given.get(MKL_VARIABLE) == MKL_SSE4_2 else None)

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> EngineEnvironment:
        """Return the environment of a score; fields that its fingerprint lacks are None."""
        if any(name in fingerprint.flags for name in CHOOSING_VARIABLES):
            return AS_IT_IS  # the user mixed kernels of different instruction sets
        return cls(instruction_set_of(fingerprint), mkl_kernels_of(fingerprint))

    def nearest(self) -> EngineEnvironment:
        """Return the nearest environment that this machine can be held to.

        Its instruction set is the same, or this machine's highest one if that is lower.
        """
        available = available_instruction_sets()
        if self.instruction_set is None or not available:
            return AS_IT_IS
        chosen = self.instruction_set if self.instruction_set in available else available[-1]
        on_intel = cpu_vendor() == "GenuineIntel"
        return EngineEnvironment(chosen, MklKernels.SSE4_2 if on_intel and self.mkl is MklKernels.AMD else None)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process in this environment, which must call `hold_this_process`.

        Raises EnvironmentUnavailableError if this machine, or this process's environment, lacks the instruction set.
        """
        if self.instruction_set is None:
            return {}
        available = available_instruction_sets()
        if self.instruction_set not in available:
            names = ", ".join(each.value for each in available) or "none"
            raise EnvironmentUnavailableError(
                f"this machine cannot be held to the instruction set {self.instruction_set.value!r}; possible: {names}"
            )
        level = _LEVELS[self.instruction_set]
        variables = {
            VARIABLE: self.instruction_set.value,
            "ATEN_CPU_CAPABILITY": level.aten,
            "ONEDNN_MAX_CPU_ISA": level.onednn,
            "MKL_ENABLE_INSTRUCTIONS": level.mkl,
        }
        if self.mkl is MklKernels.SSE4_2:
            variables[MKL_VARIABLE] = MKL_SSE4_2
        return variables


AS_IT_IS = EngineEnvironment()


def available_instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that processes can be held to, lowest first; empty if the CPU is not x86-64.

    These are the sets of this CPU, up to the one that this process is held to.
    """
    held = EngineEnvironment.of_variables().instruction_set
    return tuple(each for each in instruction_sets_of_cpu() if held is None or held.includes(each))


def offered_environments() -> dict[str, EngineEnvironment]:
    """Return the environments that this machine can be held to, by the names under which a worker offers them.

    An Intel CPU offers each instruction set also with MKL's SSE4.2 kernels, which are the nearest to AMD's.
    """
    own = mkl_kernels()
    offered = {}
    for instruction_set in available_instruction_sets():
        offered[environment_name(instruction_set, own)] = EngineEnvironment(instruction_set)
        if own is MklKernels.INTEL:
            near_amd = EngineEnvironment(instruction_set, MklKernels.SSE4_2)
            offered[environment_name(instruction_set, MklKernels.SSE4_2)] = near_amd
    return offered


def hold_this_process(environment: EngineEnvironment | None = None) -> None:
    """Hold this process to `environment` (None: that of its variables). Call it before torch is used.

    Child processes inherit the variables. Raises EnvironmentUnavailableError if this machine lacks the instruction set,
    and RuntimeError if torch has already selected its kernels.
    """
    chosen = EngineEnvironment.of_variables() if environment is None else environment
    if chosen.instruction_set is None:
        return
    os.environ.update(chosen.variables())
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        raise EnvironmentUnavailableError(
            f"torch {torch.__version__} cannot be held to an instruction set: it has no torch.cpu.get_capabilities"
        )
    capability, expected = torch.backends.cpu.get_cpu_capability(), os.environ["ATEN_CPU_CAPABILITY"].upper()
    if capability != expected:
        raise RuntimeError(f"torch selected its {capability} kernels before this process was held to {expected}")
    visible = visible_capabilities(chosen.instruction_set, torch.cpu.get_capabilities())
    torch.cpu.get_capabilities = lambda: visible  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Level:
    """The names of an instruction set in Linux and in libraries.

    `flags`: Linux's flags that this set adds to the next lower one. `aten`, `onednn`, `mkl`: the values of the three
    variables. `hides`: prefixes of the entries of `torch.cpu.get_capabilities()` that a higher set adds.
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


def visible_capabilities(instruction_set: InstructionSet, capabilities: Mapping[str, object]) -> dict[str, object]:
    """Return `capabilities` (of `torch.cpu.get_capabilities()`) as on a CPU with no more than this set."""
    hides = _LEVELS[instruction_set].hides
    return {name: False if name.startswith(hides) else value for name, value in capabilities.items()}


def instruction_sets_of_cpu(flags: Iterable[str] | None = None) -> tuple[InstructionSet, ...]:
    """Return the instruction sets of a CPU with these `flags` (None: this machine's), lowest first.

    Empty if it is not an x86-64 CPU with AVX2, or if the system does not list its flags.
    """
    found = set(cpu_flags() if flags is None else flags)
    sets = []
    for instruction_set, level in _LEVELS.items():
        if not found.issuperset(level.flags):
            break
        sets.append(instruction_set)
    return tuple(sets)
