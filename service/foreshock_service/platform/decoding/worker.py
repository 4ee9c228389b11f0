"""Code of a decoder process: what it loads when it starts, and the limits on the memory and time of each task.

It measures tokens with the compiled pass, else with numpy's, which gives the same numbers. The first start of a release
compiles, which takes up to a minute; numba keeps the machine code on disk, and later starts load it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from foreshock import errors
from foreshock.installing import install_command
from foreshock.measures.passes import compiled
from foreshock.rollouts import DecodeLimits
from foreshock_service.platform.process import end_with_parent, spare_collections

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings

COMPILED = "compiled"
_SLOWER = "numpy, several times slower"
# The pass that this process uses: COMPILED, or numpy's and the reason.
_token_pass = ""


def prepare_token_pass(wanted: str) -> str:
    """Compile the pass or load it from numba's cache; return COMPILED, or that numpy's is used and why."""
    if wanted != COMPILED:
        return "numpy, as set by FORESHOCK_TOKEN_PASS"
    if not compiled.available():
        return f"{_SLOWER}: numba is not installed ({install_command('fast')})"
    try:
        compiled.prepare()
    except Exception as error:
        # Such as a numba that does not support this numpy.
        return f"{_SLOWER}: {type(error).__name__}: {error}"
    return COMPILED


Result = TypeVar("Result")


def decode_limits(settings: Settings) -> DecodeLimits:
    """Return the limits that a decoder checks before it decodes: those of the settings, else the library's."""
    return DecodeLimits(max_body_bytes=settings.max_body_bytes, max_tokens=settings.max_tokens)


def stored_limits() -> DecodeLimits:
    """Return the limits for stored files: these were checked on upload, perhaps under wider limits."""
    return DecodeLimits(max_body_bytes=2**40, max_rollouts=2**31, max_tokens=2**40, max_uncompressed_bytes=2**40)


def prepare_process(token_pass: str, preload: Sequence[str]) -> None:
    """Import the modules in `preload` and prepare the token pass. No task's time limit applies to it."""
    global _token_pass
    # First, because the rest may take a minute.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    import pyarrow as pa

    for module in preload:
        importlib.import_module(module)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    _token_pass = prepare_token_pass(token_pass)
    spare_collections()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def report_token_pass() -> str:
    return _token_pass


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    """Raise LimitExceededError if a decoder runs out of memory while it decodes an upload."""
    try:
        yield
    except MemoryError as error:
        raise errors.LimitExceededError(
            "decoding needs more memory than FORESHOCK_DECODE_MEMORY_BYTES allows: send smaller shards"
        ) from error


def run_task(seconds: float, memory_bytes: int, task: Callable[[], Result]) -> tuple[Result, int]:
    """Run a task within limits on its time and on the memory that it adds; return its result, and what it has added.

    After `seconds` SIGALRM kills the process, even inside native code.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = _address_space_bytes()
    most = before + memory_bytes
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return task(), _address_space_bytes() - before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _address_space_bytes() -> int:
    """Return the address space that this process takes; 0 if it is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
