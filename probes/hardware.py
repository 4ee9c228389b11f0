"""What this machine is, without loading torch: for the worker's lease, for fingerprints and for messages."""

from __future__ import annotations

import platform
import re
from pathlib import Path

__all__ = ["accelerator_name", "cpu_flags", "cpu_name", "cpu_vendor", "gpu_name", "nvidia_driver"]

_NVIDIA = Path("/proc/driver/nvidia")


def accelerator_name(configured: str = "") -> str:
    """The kind of hardware that a lease names: what is configured, else the GPU's name in short, else "cpu"."""
    if configured:
        return configured
    gpu = gpu_name()
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") if gpu else "cpu"


def device_name(accelerator: str) -> str:
    """The device behind `accelerator`, in its maker's words."""
    return (gpu_name() if accelerator != "cpu" else None) or cpu_name()


def cpu_name() -> str:
    """The processor's name, "unknown CPU" where the system does not tell."""
    return _cpuinfo("model name") or platform.processor() or "unknown CPU"


def cpu_vendor() -> str:
    """The processor's maker, such as "GenuineIntel" or "AuthenticAMD"; empty where the system does not tell."""
    return _cpuinfo("vendor_id")


def cpu_flags() -> frozenset[str]:
    """The names of the processor's features, as Linux writes them; empty where the system does not tell."""
    return frozenset(_cpuinfo("flags").split())


def gpu_name() -> str | None:
    """The first NVIDIA GPU's name, None where there is none."""
    for information in sorted(_NVIDIA.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", information.read_text("utf-8", errors="replace"), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return None


def _cpuinfo(field: str) -> str:
    """The first processor's `field`, empty where Linux does not tell it."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*:[ \t]*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def nvidia_driver() -> str | None:
    """The version of NVIDIA's kernel driver, None where there is none."""
    try:
        text = (_NVIDIA / "version").read_text("utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module[^\d]*([\d.]+)", text)
    return found.group(1) if found else None
