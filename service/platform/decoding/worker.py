"""Code of a decoder process: what it loads when it starts, and the limits on the memory and time of each task."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from foreshock.rollouts import DecodeLimits
from foreshock_service.platform.decoding.token_pass import TokenPassChoice, prepare_token_pass, token_pass
from foreshock_service.platform.garbage_collection import spare_collections
from foreshock_service.platform.parent_process import end_with_parent

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings

Result = TypeVar("Result")


class StartedDecoder(NamedTuple):
    """A decoder that is ready: its process, its token pass, and the address space that it takes."""

    pid: int
    token_pass: str
    address_space_bytes: int


def decode_limits(settings: Settings) -> DecodeLimits:
    """Return the limits that a decoder checks before it decodes."""
    return DecodeLimits(**{field.name: getattr(settings, field.name) for field in fields(DecodeLimits)})


def stored_limits() -> DecodeLimits:
    """Return the limits for stored files: these were checked on upload, perhaps under wider limits."""
    return DecodeLimits(max_body_bytes=2**40, max_rollouts=2**31, max_tokens=2**40, max_uncompressed_bytes=2**40)


def prepare_process(choice: TokenPassChoice, preload: Sequence[str]) -> None:
    """Import the modules in `preload` and prepare the token pass."""
    # First, because the rest may take a minute.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    import pyarrow as pa

    for module in preload:
        importlib.import_module(module)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    prepare_token_pass(choice)
    spare_collections()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def report_start() -> StartedDecoder:
    """Return what this process is, once it is prepared."""
    return StartedDecoder(os.getpid(), token_pass(), address_space_bytes())


def run_task(seconds: float, memory_bytes: int, task: Callable[[], Result]) -> Result:
    """Run a task within limits on its time and on the memory that it takes beyond what the process holds before it.

    Past `seconds` the process is killed by SIGALRM, whatever native code it is in.
    """
    _limit_address_space(address_space_bytes() + memory_bytes)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return task()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def address_space_bytes(pid: int | None = None) -> int:
    """Return the address space that a process takes; 0 if it is not known."""
    try:
        with open(f"/proc/{pid or 'self'}/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit_address_space(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
