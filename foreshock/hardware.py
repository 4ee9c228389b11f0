"""The hardware of this machine, read without torch, for leases, fingerprints and messages."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from foreshock.environment import device_slug

__all__ = ["accelerator_name", "cpu_flags", "cpu_name", "cpu_vendor", "gpu_name", "nvidia_driver"]

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
