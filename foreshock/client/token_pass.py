"""The pass over tokens of a client that measures: compiled, if numba is installed, else numpy's."""

from __future__ import annotations

import threading

from foreshock.measures.passes import compiled
from foreshock.measures.passes.compiling import compile_elsewhere

__all__ = ["NUMPY_PASS", "prepare_token_pass"]

NUMPY_PASS = (
    "numba is not installed, so that numpy measures the tokens, which takes several times the CPU; "
    "it comes with the extra `fast` of Foreshock"
)

_lock = threading.Lock()
_failed = False


def prepare_token_pass() -> bool:
    """Load the compiled pass, or compile it in another process first; return False if numpy's is used.

    Called in the background before the first shard is measured. Later calls return at once: the pass does not change
    within a process, so that the same shard gives the same bytes.
    """
    global _failed
    with _lock:
        if compiled.is_prepared():
            return True
        if _failed or not compiled.available():
            return False
        try:
            compile_elsewhere()
            # One thread: the trainer needs the other processors.
            compiled.prepare(threads=1)
        except Exception:
            # Such as a numba that does not support this numpy; numpy's pass gives the same numbers.
            _failed = True
        return not _failed
