"""Engines that die, hang or leave rubbish: as tasks of a process, and as forward passes of `torch.own`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.rollouts import RolloutBatch


def _die() -> None:
    print("the last line before its death", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    print("the last line before it hangs", flush=True)
    time.sleep(600)


def _leave_rubbish() -> None:
    """Overwrite all results at the end of the process."""

    def overwrite() -> None:
        print("the last line before the rubbish", flush=True)
        for path in Path(sys.argv[1]).parent.iterdir():
            if path.name.startswith(("scores", "outcome", "result")):
                path.write_bytes(b"rubbish")

    atexit.register(overwrite)


def die(*_: Any) -> None:
    """End the process by a signal."""
    _die()


def hang(*_: Any) -> None:
    """Do nothing for minutes."""
    _hang()


def leave_rubbish(*_: Any) -> None:
    """Leave files that cannot be read."""
    _leave_rubbish()


def write_nothing(*_: Any) -> None:
    """Write no result."""


def _forward(misbehave: Callable[[], None]) -> Callable[[RolloutBatch], Any]:
    def forward(batch: RolloutBatch) -> Any:
        misbehave()
        return np.full(batch.num_tokens, -1.0, np.float32)

    return forward


def dying(_: Path) -> Callable[[RolloutBatch], Any]:
    """Return a forward pass that dies."""
    return _forward(_die)


def hanging(_: Path) -> Callable[[RolloutBatch], Any]:
    """Return a forward pass that hangs."""
    return _forward(_hang)


def raving(_: Path) -> Callable[[RolloutBatch], Any]:
    """Return a forward pass after which all results are rubbish."""
    return _forward(_leave_rubbish)
