"""The devices of an engine that divides a model among processes: GPUs, or a part of the CPU's cores each."""

import os

import torch

from foreshock_probes.scorers.request import TooFewDevicesError


def device_count() -> int:
    """Return the number of GPUs that this process sees; without a GPU, the number of CPU cores that it may use."""
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
    """Return the CPU cores of each of `ranks` processes: the same number for each, at least one, no core twice."""
    cores = _cores()
    size = max(1, len(cores) // ranks)
    return [cores[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _cores() -> list[int]:
    # Not every system reports the cores of a process.
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))
