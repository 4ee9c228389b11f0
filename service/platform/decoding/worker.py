"""Code of a decoder process: its limits, and the alarm around each task."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

from foreshock_service.platform.decoding.token_pass import TokenPassChoice, prepare_token_pass
from foreshock_service.platform.garbage_collection import spare_collections
from foreshock_service.platform.parent_process import end_with_parent

Result = TypeVar("Result")


def prepare_process(memory_bytes: int, choice: TokenPassChoice, preload: Sequence[str]) -> None:
    """Import the modules in `preload`, then allow `memory_bytes` of address space on top, and no core dump."""
    # First, because the rest may take a minute.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    import pyarrow as pa

    # Imported before the limit is set, so that it bounds the data alone.
    for module in preload:
        importlib.import_module(module)

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    prepare_token_pass(choice)
    spare_collections()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space_bytes() + memory_bytes
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_with_alarm(seconds: float, task: Callable[[], Result]) -> Result:
    """Run a task; past `seconds` the process is killed by SIGALRM, whatever native code it is in."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return task()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
