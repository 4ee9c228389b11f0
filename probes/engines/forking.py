"""A process for each model: an engine that can only reload weights in place is forked anew for other weights.

Of the 14 CPU seconds that vLLM needs to start with a tiny model, its imports take 9. So the process that a worker
starts imports the engine once and never loads a model. For the first command, and whenever weights or options change,
it ends its child and forks another, which loads the model and serves commands until then. No child has seen other
weights than its own.

The parent starts no thread and computes nothing, which is what makes a fork safe. It imports the engine beforehand only
for a CPU under Linux: importing it for a GPU may initialise the driver, which does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import sys
import time
import traceback

from foreshock.digests import canonical_json
from probes.engines.protocol import ScoreCommand
from probes.engines.serving import SECONDS_TO_LEAVE, serve

__all__ = ["serve_by_children"]

_POLL_SECONDS = 0.2
_IMPORTED_BEFOREHAND = {"vllm": ("vllm.entrypoints.llm", "probes.scorers.vllm_prefill")}


class _Child:
    """A forked process that serves commands for one model."""

    def __init__(self, engine: str, requests: int, replies: int) -> None:
        read, self._commands = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(requests)
            os.close(self._commands)
            _be_child(engine, read, replies)
        os.close(read)

    def give(self, line: bytes) -> None:
        """Hand on a command; a child that has ended is noticed by `status`."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, line)

    def status(self) -> int | None:
        """Return how the child ended, as `os.waitstatus_to_exitcode` has it; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end(self) -> None:
        """Have the child leave; if it does not in time, end it, what it started and this process."""
        os.close(self._commands)
        ends = time.monotonic() + SECONDS_TO_LEAVE
        while self.status() is None:
            if time.monotonic() > ends:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            time.sleep(0.01)


def serve_by_children(engine: str, requests: int, replies: int) -> int:
    """Serve commands from the file descriptor `requests` until it ends, each model in a process of its own.

    Where a child ends by itself, this process ends in the same way.
    """
    child: _Child | None = None
    model = ""
    received = b""
    while True:
        if child is not None and (status := child.status()) is not None:
            return _end_like(status)
        if not select.select([requests], [], [], _POLL_SECONDS)[0]:
            continue
        piece = os.read(requests, 65_536)
        if not piece:
            if child is not None:
                child.end()
            return 0
        received += piece
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            command = ScoreCommand.model_validate_json(line)
            wanted = _model_of(command)
            if child is not None and wanted != model:
                child.end()
                child = None
            if child is None:
                if command.accelerator == "cpu" and sys.platform == "linux":
                    for name in _IMPORTED_BEFOREHAND.get(engine, ()):
                        importlib.import_module(name)
                child, model = _Child(engine, requests, replies), wanted
            child.give(line + b"\n")


def _model_of(command: ScoreCommand) -> str:
    """Return a text that is the same for commands that one process may serve."""
    return canonical_json([command.weights_folder, command.weights_digest, command.options, command.accelerator])


def _be_child(engine: str, requests: int, replies: int) -> None:
    status = 1
    try:
        serve(engine, requests, replies)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # What an engine has started is ended by functions that it registered; Python's own end only takes time.
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_like(status: int) -> int:
    """Return the exit status of this process, or end it by the signal that ended the child."""
    if status < 0:
        os.kill(os.getpid(), -status)
    return status or 1
