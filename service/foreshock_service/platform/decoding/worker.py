"""Code of a decoder process: what it loads when it starts, and the limits on the memory and time of each task.

It measures tokens with the compiled pass, else with numpy's, which gives the same numbers. Compiling takes about a
minute. Numba keeps the machine code on disk, and one process at a time compiles. At the first start of a release
decoders use numpy's pass until another process has compiled; a marker file beside the machine code then exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from foreshock.installing import install_command
from foreshock.measures.passes import compiled
from foreshock.measures.passes.compiling import one_at_a_time, package_folder
from foreshock.rollouts import DecodeLimits
from foreshock_service.platform.process import end_with_parent, spare_collections, spare_pandas

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings

COMPILED = "compiled"
FOR_NOW = "numpy for now: the first start of a release compiles the pass over tokens, which takes about a minute"
_SLOWER = "numpy, several times slower"

_found = f"{_SLOWER}: nothing was prepared"


@dataclass(frozen=True, slots=True)
class TokenPassChoice:
    """Whether to compile, and the folder of compiled code (None: numba's default, beside the package).

    `for_now`: use numpy's pass until another process has compiled.
    """

    compile: bool
    folder: Path | None
    for_now: bool = False

    @property
    def code_folder(self) -> Path:
        """The folder of the machine code, and of its marker and lock."""
        return self.folder or package_folder() / "__pycache__"


def chosen_token_pass(settings: Settings) -> TokenPassChoice:
    """Return the choice of the settings; the default folder is beside the package, else beside the token store."""
    folder = None
    if settings.compiled_folder:
        folder = Path(settings.compiled_folder).absolute()
    elif not os.access(package_folder(), os.W_OK):
        folder = settings.store_folder.parent / "compiled"
    return TokenPassChoice(settings.token_pass == COMPILED, folder)


def prepare_token_pass(choice: TokenPassChoice) -> None:
    """Compile the pass or load the compiled one; if that fails numpy's is used, and `token_pass` gives the reason.

    Must come before anything else imports numba.
    """
    global _found
    if choice.for_now:
        _found = FOR_NOW
        return
    if not choice.compile:
        _found = "numpy, as set by FORESHOCK_TOKEN_PASS"
        return
    if not compiled.available():
        _found = f"{_SLOWER}: numba is not installed ({install_command('fast')})"
        return
    try:
        if choice.folder is not None:
            # Machine code from this folder is executed, so no other user may write it.
            choice.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ["NUMBA_CACHE_DIR"] = str(choice.folder)
        with one_at_a_time(choice.code_folder):
            compiled.prepare()
            with contextlib.suppress(OSError):
                _marker(choice).touch()
        _found = COMPILED
    except Exception as error:
        # Such as a numba that does not support this numpy; numpy's pass is slower and still correct.
        _found = f"{_SLOWER}: {type(error).__name__}: {error}"


def first_choice(choice: TokenPassChoice) -> TokenPassChoice:
    """Return the choice that decoders start with: numpy's pass for now if they would have to compile, else `choice`."""
    must_compile = choice.compile and compiled.available() and not _marker(choice).exists()
    return replace(choice, for_now=must_compile)


def _marker(choice: TokenPassChoice) -> Path:
    """Return the path of the marker that these sources were compiled with these libraries on such a machine."""
    parts = [sys.version, platform.machine()]
    parts += [f"{name} {version(name)}" for name in ("numba", "numpy")]
    # By size and time, as numba decides whether a source has changed.
    for source in sorted(package_folder().glob("*.py")):
        found = source.stat()
        parts.append(f"{source.name} {found.st_size} {found.st_mtime_ns}")
    return choice.code_folder / f"compiled-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"


def token_pass() -> str:
    """Return the pass that this process uses: COMPILED, or numpy's and the reason."""
    return _found


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
    spare_pandas()
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
    """Run a task within limits on its time and on the memory that it adds to the process.

    After `seconds` SIGALRM kills the process, even inside native code.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = address_space_bytes() + memory_bytes
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
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
