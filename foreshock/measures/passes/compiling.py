"""Compile the token pass once per machine: one process at a time, into numba's cache on disk.

`python -m foreshock.measures.passes.compiling` compiles in a process of its own, so that no thread of a trainer waits
for the compiler, which holds the GIL.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreshock.measures.passes import compiled

_LONGEST_SECONDS = 300.0
_NICENESS = 10


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the compile lock in `folder`: of processes that start together, one compiles and the others load."""
    folder.mkdir(exist_ok=True)
    with (folder / "compiling.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def package_folder() -> Path:
    """Return the source folder of the compiled pass, in which numba keeps the machine code."""
    return Path(str(compiled.__file__)).parent


def compile_elsewhere() -> None:
    """Fill numba's cache from another process of low priority. If that fails, nothing happens: the caller compiles."""
    try:
        subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return


def _compile() -> None:
    os.nice(_NICENESS)
    cache = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(cache) if cache else package_folder() / "__pycache__"
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        # The machine code could not be stored, so compiling here is useless.
        return
    with one_at_a_time(folder):
        compiled.prepare()


if __name__ == "__main__":
    _compile()
