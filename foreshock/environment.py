"""The environment of a score, read from its fingerprint, and what differs between two environments.

The same weights and tokens give other log-probs on another device, under another instruction set of a CPU, or with
other kernels. A replay in another environment than the run's contains that difference, whatever else it shows.

A field that a fingerprint lacks is unknown, and unknown is not equal.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from foreshock.api.records import Record
from foreshock.fingerprint import Fingerprint

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


class MklKernels(enum.Enum):
    """The kernels with which MKL computes float32 products.

    On an AMD CPU MKL uses other kernels for every instruction set; they cannot be selected on an Intel CPU. The SSE4.2
    kernels are the nearest to them: with torch 2.13 they give the same bits in attention over bfloat16 up to 192 keys,
    and differ in the last bits beyond that and in float32 products.
    """

    INTEL = "intel"
    """The kernels of the instruction set, on an Intel CPU."""
    AMD = "amd"
    SSE4_2 = "sse4.2"
    """The SSE4.2 kernels, on an Intel CPU that is restricted to them."""


# The feature that each instruction set adds to the one below, as named in a fingerprint's `cpu_features`.
_FEATURES = {
    InstructionSet.AVX512: "avx512",
    InstructionSet.AVX512_VNNI: "vnni",
    InstructionSet.AVX512_BF16: "avx512_bf16",
    InstructionSet.AMX: "amx_tile",
}


def instruction_set_of(fingerprint: Fingerprint) -> InstructionSet | None:
    """Return the instruction set that computed a score on a CPU; None if its fingerprint does not show it.

    `cpu_isa` has the choice of torch, and the flag `cpu_features` the features by which other libraries choose; from
    AVX-512 on both are needed. The two contradict each other if `ATEN_CPU_CAPABILITY` restricted only torch.
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
    """Return the kernels that MKL used for a score on a CPU, by the flag, else by the CPU's maker; None if unknown."""
    kernels = fingerprint.flags.get("mkl_kernels")
    if kernels in {each.value for each in MklKernels}:
        return MklKernels(kernels)
    maker = (fingerprint.device_name or "").split(" ")[0]
    return {"AMD": MklKernels.AMD, "Intel(R)": MklKernels.INTEL}.get(maker)


CPU = "CPU"
# Flags of a fingerprint that choose kernels or their order of summation, with their titles. Other flags describe the
# batches and caches of sampling, which a replay leaves out on purpose, or do not change a result.
_SETTINGS = {
    "enforce_eager": "eager mode (no torch.compile, no CUDA graphs)",
    "tensor_parallel_size": "the tensor-parallel size",
    "kv_cache_dtype": "the dtype of the KV cache",
    "bfloat16_conversion": "the engine's conversion of float32 to bfloat16",
    "float32_matmul_precision": "torch's precision of float32 products",
    "VLLM_BATCH_INVARIANT": "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_SGL_KERNEL": "VLLM_CPU_SGL_KERNEL",
    "VLLM_USE_V2_MODEL_RUNNER": "VLLM_USE_V2_MODEL_RUNNER",
}
_OPTIONAL = {
    "torch_version": "torch's version",
    "dtype": "the engine's dtype",
    "head_dtype": "the dtype of the language-model head",
    "quantization": "the quantization",
    "attention_backend": "the attention kernels",
}
# Not compared for torch: a trainer's precision is an option of its replay, the subject of conclusions on precision.
_PRECISION = ("dtype", "head_dtype")
_MKL_TITLES = {
    MklKernels.INTEL.value: "Intel's",
    MklKernels.AMD.value: "AMD's",
    MklKernels.SSE4_2.value: "those of SSE4.2",
}
_ISA_TITLES = {
    InstructionSet.AVX2.value: "AVX2",
    InstructionSet.AVX512.value: "AVX-512",
    InstructionSet.AVX512_VNNI.value: "AVX-512 with VNNI",
    InstructionSet.AVX512_BF16.value: "AVX-512 with bfloat16",
    InstructionSet.AMX.value: "AVX-512 with AMX",
}
# Words in the names of CPUs; accelerators have none of them.
_CPU_NAME = re.compile(
    r"\b(CPU|EPYC|Xeon|Ryzen|Threadripper|Opteron|Neoverse|Graviton|Kunpeng|x86_64|aarch64|arm64)\b"
    r"|Core\(TM\)|Apple M\d"
)
_SYSTEMS = ("Linux", "Darwin", "Windows")
_NOT_INTEL = {MklKernels.AMD: "amd", MklKernels.SSE4_2: "sse4.2", None: "other"}


class Environment(Record):
    """Hardware and software that computed a score; None: unknown.

    `device` is "CPU" or the name of the GPU. `instruction_set` (a value of `InstructionSet`, or torch's name of another
    one) and `mkl_kernels` (a value of `MklKernels`) are those of a CPU, `driver` that of a GPU. `settings` are the
    flags of the fingerprint that choose kernels.
    """

    device: str | None = None
    instruction_set: str | None = None
    mkl_kernels: str | None = None
    driver: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    torch_version: str | None = None
    dtype: str | None = None
    head_dtype: str | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> Environment:
        device = _device_of(fingerprint)
        on_cpu = device == CPU
        kernels, found, isa = mkl_kernels_of(fingerprint), instruction_set_of(fingerprint), fingerprint.cpu_isa
        # An AVX of which the fingerprint does not show the level is unknown.
        instruction_set = found.value if found else None if isa is None or isa.startswith("AVX") else isa.lower()
        names = (*_SETTINGS, *(CHOOSING_VARIABLES if on_cpu else ()))
        return cls(
            device=device,
            instruction_set=instruction_set if on_cpu else None,
            mkl_kernels=kernels.value if on_cpu and kernels is not None else None,
            driver=fingerprint.driver if device is not None and not on_cpu else None,
            engine=fingerprint.engine,
            engine_version=fingerprint.engine_version,
            torch_version=fingerprint.library_versions.get("torch"),
            dtype=fingerprint.dtype,
            head_dtype=fingerprint.head_dtype,
            quantization=fingerprint.quantization,
            attention_backend=fingerprint.attention_backend,
            settings={name: fingerprint.flags[name] for name in names if name in fingerprint.flags},
        )

    def __hash__(self) -> int:
        return hash((self.platform, self.dtype, self.attention_backend))

    @property
    def platform(self) -> tuple[str | None, ...]:
        """The hardware and versions: scores of one scorer with the same platform replace each other."""
        hardware = (self.device, self.instruction_set, self.mkl_kernels, self.driver)
        return (*hardware, self.engine, self.engine_version, self.torch_version)

    def describe(self) -> str:
        """Return the hardware in words: "a CPU with AVX2 and AMD's MKL kernels", "NVIDIA H200"."""
        if self.device is None:
            return "an unknown device"
        if self.device != CPU:
            return self.device
        words = _ISA_TITLES.get(self.instruction_set or "", self.instruction_set or "an unknown instruction set")
        kernels = _MKL_TITLES.get(self.mkl_kernels or "")
        if kernels is None or self.mkl_kernels == MklKernels.INTEL.value:
            return f"a CPU with {words}"
        return (
            f"a CPU with {words} and {'SSE4.2' if self.mkl_kernels == MklKernels.SSE4_2.value else kernels} MKL kernels"
        )

    def offer_names(self) -> tuple[str, ...]:
        """Return the names under which workers offer this environment, the exact one first, then the nearest ones.

        On an Intel CPU, MKL's SSE4.2 kernels come nearest to AMD's. Empty if no worker can be asked for it.
        """
        if self.device is None:
            return ()
        if self.device != CPU:
            return (device_slug(self.device),)
        if self.instruction_set not in _ISA_TITLES:
            return ()
        instruction_set = InstructionSet(self.instruction_set)
        kernels = {
            MklKernels.AMD.value: (MklKernels.AMD, MklKernels.SSE4_2, MklKernels.INTEL),
            MklKernels.SSE4_2.value: (MklKernels.SSE4_2, MklKernels.AMD, MklKernels.INTEL),
            MklKernels.INTEL.value: (MklKernels.INTEL,),
        }.get(self.mkl_kernels or "", (MklKernels.INTEL, MklKernels.AMD, None))
        return tuple(environment_name(instruction_set, each) for each in kernels)


_Values = tuple[str, str | None, str | None]
"""The title of a field, and its value in each of two environments."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two environments differ; None: the fingerprint of that score lacks it."""

    title: str
    earlier: str | None
    later: str | None

    @property
    def is_known(self) -> bool:
        return self.earlier is not None and self.later is not None

    def words(self, earlier: str, later: str) -> str:
        """Return "the CPU's instruction set: AVX2 at sampling, AVX-512 in the replay" for those two places."""
        return f"{self.title}: {self.earlier or 'unknown'} {earlier}, {self.later or 'unknown'} {later}"


def differences(earlier: Environment | None, later: Environment | None, *, same_engine: bool) -> tuple[Difference, ...]:
    """Return what differs between the environments of two scores, or is unknown in one of them.

    The device, the instruction set and MKL's kernels of a CPU, and the driver of a GPU always count. With `same_engine`
    the engine, its version, its kernels and the flags that choose them count too; of these, only engine and version
    count as different if they are unknown, because a replay cannot know the others if they were not logged. The dtypes
    of torch are left out: a trainer's precision is an option of its replay.
    """
    before, after = earlier or Environment(), later or Environment()
    found: list[_Values] = [("the device", before.device, after.device)]
    if before.device == after.device == CPU:
        first, second = (_ISA_TITLES.get(each.instruction_set or "", each.instruction_set) for each in (before, after))
        found.append(("the CPU's instruction set", first, second))
        first, second = (_MKL_TITLES.get(each.mkl_kernels or "") for each in (before, after))
        found.append(("MKL's kernels, chosen by the CPU's maker", first, second))
        found += [
            (name, before.settings.get(name, "not set"), after.settings.get(name, "not set"))
            for name in CHOOSING_VARIABLES
        ]
    elif before.device is not None and before.device == after.device:
        found.append(("the GPU's driver", before.driver, after.driver))
    if same_engine:
        found += _of_engine(before, after)
    return tuple(Difference(*each) for each in found if each[1] is None or each[1] != each[2])


def environment_name(instruction_set: InstructionSet, kernels: MklKernels | None) -> str:
    """Return the name under which a worker offers an environment of a CPU: "avx2", "avx2-amd", "avx512-sse4.2".

    The suffix names MKL's kernels if they are not those of an Intel CPU's instruction set.
    """
    suffix = _NOT_INTEL.get(kernels)
    return instruction_set.value if suffix is None else f"{instruction_set.value}-{suffix}"


def device_slug(name: str) -> str:
    """Return a device's name in the form of accelerator types and environments: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _of_engine(before: Environment, after: Environment) -> list[_Values]:
    """Return engine and version, and the kernels and flags that both fingerprints have."""
    if before.engine != after.engine:
        return [("the engine", before.engine, after.engine)]
    optional = {name: title for name, title in _OPTIONAL.items() if before.engine != "torch" or name not in _PRECISION}
    pairs = [(title, getattr(before, name), getattr(after, name)) for name, title in optional.items()]
    pairs += [(title, before.settings.get(name), after.settings.get(name)) for name, title in _SETTINGS.items()]
    version = f"the version of {before.engine or 'the engine'}", before.engine_version, after.engine_version
    return [version, *(each for each in pairs if each[1] is not None and each[2] is not None)]


def _device_of(fingerprint: Fingerprint) -> str | None:
    name, driver = fingerprint.device_name, fingerprint.driver or ""
    if "cpu_features" in fingerprint.flags or driver.startswith(_SYSTEMS):
        return CPU
    if name is None:
        return None
    return CPU if _CPU_NAME.search(name) else name
