"""Devices of this machine for a model that is divided among several processes."""

from __future__ import annotations

import os

import torch

from foreshock_probes.scorers.request import TooFewDevicesError

__all__ = ["check_devices", "cores_of_ranks", "device_count"]


def device_count() -> int:
    """Return the number of GPUs that this process sees, else that of the CPU cores that it may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else len(_cores())


def check_devices(option: str, needed: int) -> None:
    """Raise TooFewDevicesError if the option needs more devices than this machine has, one for each process."""
    available = device_count()
    if needed > available:
        kind = "GPU" if torch.cuda.is_available() else "CPU core"
        raise TooFewDevicesError(
            f"{option}={needed} needs {needed} {kind}s, one for each process; this worker has {available}: start a "
            f"worker with {needed} or lower the option"
        )


def cores_of_ranks(ranks: int) -> list[list[int]]:
    """Return the CPU cores of each of `ranks` processes: as many for each, at least one, no core twice."""
    cores = _cores()
    size = max(1, len(cores) // ranks)
    return [cores[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _cores() -> list[int]:
    # Not every system tells the cores of a process.
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))
