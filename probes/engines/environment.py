"""The environment that an engine's process computes in: this machine as it is, or held to less of it.

The same weights and tokens give other log-probs under another instruction set: kernels sum in another order and round
elsewhere, and vLLM has builds of its own for AVX2, for AVX-512 and for AVX-512 with bfloat16. A replay gives what was
logged, bit for bit, under the instruction set that logged it. A CPU that has more is held to it:

- `ATEN_CPU_CAPABILITY` chooses among torch's own kernels, `ONEDNN_MAX_CPU_ISA` among oneDNN's (torch and vLLM have a
  copy each), `MKL_ENABLE_INSTRUCTIONS` among MKL's, which torch uses for float32 products and within attention;
- vLLM chooses its build and its attention by `torch.cpu.get_capabilities()`, which no variable changes:
  `hold_this_process` hides from it what `FORESHOCK_INSTRUCTION_SET` excludes.

On Intel CPUs a held process computes, bit for bit, what a CPU without the further instructions computes
(`make bench-held-processes` compares the two). MKL also chooses by the CPU's maker: see `MklKernels`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from probes.engines.instruction_sets import InstructionSet, instruction_set_of, instruction_sets_of_cpu
from probes.hardware import cpu_vendor

__all__ = [
    "AS_IT_IS",
    "VARIABLE",
    "EngineEnvironment",
    "EnvironmentUnavailableError",
    "MklKernels",
    "available_instruction_sets",
    "hand_set_variables",
    "hold_this_process",
    "mkl_kernels",
]

VARIABLE = "FORESHOCK_INSTRUCTION_SET"
_CHOOSING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
_MKL_VARIABLE, _MKL_SSE4_2 = "MKL_ENABLE_INSTRUCTIONS", "SSE4_2"


class EnvironmentUnavailableError(ForeshockError):
    """This machine cannot be held to the environment; the message names those that it can be held to."""


class MklKernels(enum.Enum):
    """Whose kernels MKL computes float32 products with.

    On an AMD CPU it has kernels of their own, whatever the instruction set, which an Intel CPU cannot be asked for. Its
    SSE4.2 kernels come nearest: with torch 2.13 they give the same bits as AMD's in attention over bfloat16 up to 192
    keys, and other last bits beyond that and in float32 products.
    """

    INTEL = "intel"
    """Those of the instruction set."""
    AMD = "amd"
    SSE4_2 = "sse4.2"
    """On an Intel CPU that is held to them."""


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The instruction set and the MKL kernels that a process is held to. None: what this machine has."""

    instruction_set: InstructionSet | None = None
    mkl: MklKernels | None = None

    @classmethod
    def of_variables(cls, variables: Mapping[str, str] | None = None) -> EngineEnvironment:
        """Return the environment that `variables` (None: this process's) hold a process to.

        Raises EnvironmentUnavailableError if FORESHOCK_INSTRUCTION_SET names none.
        """
        given = os.environ if variables is None else variables
        name = given.get(VARIABLE, "")
        if not name:
            return AS_IT_IS
        if name not in {each.value for each in InstructionSet}:
            names = ", ".join(each.value for each in InstructionSet)
            raise EnvironmentUnavailableError(f"{VARIABLE} must be one of {names}, got {name!r}")
        return cls(InstructionSet(name), MklKernels.SSE4_2 if given.get(_MKL_VARIABLE) == _MKL_SSE4_2 else None)

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> EngineEnvironment:
        """Return the environment that made a score; None in it: the fingerprint does not tell."""
        if any(name in fingerprint.flags for name in _CHOOSING):
            return AS_IT_IS  # kernels of different instruction sets were mixed by hand
        kernels = fingerprint.flags.get("mkl_kernels")
        if kernels in {each.value for each in MklKernels}:
            return cls(instruction_set_of(fingerprint), MklKernels(kernels))
        maker = (fingerprint.device_name or "").split(" ")[0]
        by_maker = {"AMD": MklKernels.AMD, "Intel(R)": MklKernels.INTEL}
        return cls(instruction_set_of(fingerprint), by_maker.get(maker))

    def nearest(self) -> EngineEnvironment:
        """Return the environment nearest to this one that this machine can be held to.

        The instruction set is the same or, if this machine has less, its highest.
        """
        available = available_instruction_sets()
        if self.instruction_set is None or not available:
            return AS_IT_IS
        chosen = self.instruction_set if self.instruction_set in available else available[-1]
        on_intel = cpu_vendor() == "GenuineIntel"
        return EngineEnvironment(chosen, MklKernels.SSE4_2 if on_intel and self.mkl is MklKernels.AMD else None)

    def stands_for(self, other: EngineEnvironment) -> bool:
        """Return whether scores made in this environment should equal those made in `other`, bit for bit.

        The instruction sets must be the same, and MKL's kernels too or SSE4.2 in place of AMD's (see `MklKernels`).
        """
        same_kernels = self.mkl is other.mkl or (self.mkl, other.mkl) == (MklKernels.SSE4_2, MklKernels.AMD)
        return self.instruction_set is not None and self.instruction_set is other.instruction_set and same_kernels

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process that is held to this; it has to call `hold_this_process`.

        Raises EnvironmentUnavailableError if this machine, or what this process is held to, has less.
        """
        if self.instruction_set is None:
            return {}
        available = available_instruction_sets()
        if self.instruction_set not in available:
            names = ", ".join(each.value for each in available) or "none"
            raise EnvironmentUnavailableError(
                f"this machine cannot be held to the instruction set {self.instruction_set.value!r}; "
                f"those that it can be held to: {names}"
            )
        variables = {VARIABLE: self.instruction_set.value, **self.instruction_set.variables()}
        if self.mkl is MklKernels.SSE4_2:
            variables[_MKL_VARIABLE] = _MKL_SSE4_2
        return variables


AS_IT_IS = EngineEnvironment()


def available_instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that processes can be held to, lowest first; none on other CPUs than x86-64.

    They are this CPU's, up to the one that this process is held to.
    """
    held = EngineEnvironment.of_variables().instruction_set
    return tuple(each for each in instruction_sets_of_cpu() if held is None or held.includes(each))


def mkl_kernels() -> MklKernels | None:
    """Return whose kernels MKL, if torch has it, uses in this process; None if the CPU is neither Intel's nor AMD's."""
    held = MklKernels.SSE4_2 if os.environ.get(_MKL_VARIABLE) == _MKL_SSE4_2 else MklKernels.INTEL
    return {"GenuineIntel": held, "AuthenticAMD": MklKernels.AMD}.get(cpu_vendor())


def hand_set_variables() -> dict[str, str]:
    """Return the variables by which kernels are chosen in this process, except those that its environment sets."""
    own = EngineEnvironment.of_variables().variables()
    return {name: os.environ[name] for name in _CHOOSING if name in os.environ and os.environ[name] != own.get(name)}


def hold_this_process(environment: EngineEnvironment | None = None) -> None:
    """Hold this process to `environment` (None: to what its variables say); to be called before torch is used.

    Processes that it starts inherit the variables. Raises EnvironmentUnavailableError if this machine has less, and
    RuntimeError if torch has chosen its kernels already.
    """
    chosen = EngineEnvironment.of_variables() if environment is None else environment
    if chosen.instruction_set is None:
        return
    os.environ.update(chosen.variables())
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        raise EnvironmentUnavailableError(f"torch {torch.__version__} cannot be held: no torch.cpu.get_capabilities")
    capability, wanted = torch.backends.cpu.get_cpu_capability(), os.environ["ATEN_CPU_CAPABILITY"].upper()
    if capability != wanted:
        raise RuntimeError(f"torch chose its {capability} kernels before this process was held to {wanted}")
    visible = chosen.instruction_set.visible(torch.cpu.get_capabilities())
    torch.cpu.get_capabilities = lambda: visible  # type: ignore[assignment]
