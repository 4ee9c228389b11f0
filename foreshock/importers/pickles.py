"""Read a pickle or a `.pt` file in a process of its own, with limits on memory and time.

The child gets the open file as its stdin and an empty environment. It unpickles tensors, arrays and plain data only
(`unpickling.py`: any other name is refused) and returns JSON lines. Neither torch nor the framework is needed.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from foreshock.errors import ConfigurationError, InvalidRolloutsError, LimitExceededError
from foreshock.parsing import parse_json
from foreshock.rollouts.schema import DecodeLimits

_CHILD = "foreshock.importers.unpickling"
_CPU_SECONDS = 300
_WALL_SECONDS = 600
_MEMORY_BYTES = 8 << 30
_LONGEST_REASON = 500


def read_pickled(
    path: Path, kind: Literal["pt", "pickle"], columns: Sequence[str], limits: DecodeLimits, *, allowed: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the named columns of each rollout of a dump, and the dump's own numbers.

    `kind` is "pt" for a file of `torch.save`, "pickle" for a pickle. Raises ConfigurationError unless `allowed`,
    InvalidRolloutsError or LimitExceededError naming the file.
    """
    if not allowed:
        raise ConfigurationError(
            f"{path.name} is a pickle, which may contain code. With --allow-pickle it is read in a process of its "
            "own that unpickles tensors and plain data only"
        )
    words = [sys.executable, "-s", "-m", _CHILD, kind, str(_MEMORY_BYTES), str(_CPU_SECONDS), *columns]
    # Python finds its packages by PYTHONPATH; nothing else of the environment is passed on, above all no API key.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    try:
        with path.open("rb") as file:
            process = subprocess.Popen(
                words,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        raise InvalidRolloutsError(f"{path.name} cannot be read: {error}") from error
    deadline = threading.Timer(_WALL_SECONDS, process.kill)
    deadline.start()
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            written = process.stdout.read(limits.max_uncompressed_bytes + 1)
            if len(written) > limits.max_uncompressed_bytes:
                raise LimitExceededError(
                    f"{path.name} has more than {limits.max_uncompressed_bytes:,} bytes of numbers"
                )
            reason = process.stderr.read(_LONGEST_REASON).decode(errors="replace").strip()
        finally:
            process.kill()
            deadline.cancel()
    if process.returncode != 0:
        raise InvalidRolloutsError(f"{path.name} cannot be imported: {reason or _ending(process.returncode)}")
    try:
        # The child is not trusted.
        head, *rows = map(parse_json, written.splitlines())
        if not all(isinstance(each, dict) for each in (head, *rows)):
            raise ValueError("a line is no JSON object")
    except ValueError as error:
        raise InvalidRolloutsError(f"{path.name}: the process that reads it returned no table: {error}") from error
    return rows, head


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return f"reading took more than {_WALL_SECONDS} s, or more memory than this machine has"
    if status == -signal.SIGXCPU:
        return f"reading took more than {_CPU_SECONDS} s of computing"
    return f"the process that reads it ended with status {status}"
