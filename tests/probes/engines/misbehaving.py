"""Engines that die, hang or leave rubbish, as tasks of a process; and a forward pass of `torch.own` that dies."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreshock.rollouts import RolloutBatch


def die(*_: Any) -> None:
    """End the process by a signal."""
    print("the last line before its death", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_: Any) -> None:
    """Do nothing for minutes."""
    print("the last line before it hangs", flush=True)
    time.sleep(600)


def leave_rubbish(*_: Any) -> None:
    """Overwrite all results at the end of the process."""

    def overwrite() -> None:
        print("the last line before the rubbish", flush=True)
        for path in Path(sys.argv[1]).parent.iterdir():
            if path.name.startswith(("scores", "outcome", "result")):
                path.write_bytes(b"rubbish")

    atexit.register(overwrite)


def write_nothing(*_: Any) -> None:
    """Write no result."""


def dying(_: Path) -> Callable[[RolloutBatch], Any]:
    """Return a forward pass that dies."""
    return die
