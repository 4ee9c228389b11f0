"""CPU time and memory of the service's processes, read from /proc."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 0.5


def service_processes(folder: str = "") -> list[int]:
    """Return the processes that this process started, and theirs: the service and its decoders.

    With `folder` those of the service that was started in it alone.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = [os.getpid()]
    if folder:
        waiting = [each for each in children.get(os.getpid(), []) if os.readlink(f"/proc/{each}/cwd") == folder]
        found = list(waiting)
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def cpu_seconds(folder: str = "") -> float:
    """Return user and system time of the service's processes, with that of decoders that have been replaced."""
    total = 0
    for process in service_processes(folder):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # utime, stime, and those of the children that were waited for
        total += sum(int(value) for value in fields[11:15])
    return total / _TICKS


def memory_bytes() -> int:
    """Return the memory of the service's processes: pages that several of them share are counted once."""
    total = 0
    for process in service_processes():
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total << 10


@dataclass
class MemorySamples:
    """Memory of the service over time, in bytes."""

    values: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Return the largest sample."""
        return max(self.values)

    @property
    def growth(self) -> float:
        """Return the peak of the last third over the peak of the second third: 1 if the memory is flat."""
        third = len(self.values) // 3
        return max(self.values[2 * third :]) / max(self.values[third : 2 * third] or self.values)


@contextmanager
def sampled_memory() -> Iterator[MemorySamples]:
    """Sample the memory of the service twice a second."""
    samples, done = MemorySamples(), threading.Event()

    def sample() -> None:
        while True:
            samples.values.append(memory_bytes())
            if done.wait(_SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
