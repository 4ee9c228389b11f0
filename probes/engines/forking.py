"""Fork a process for each model, for engines that can only reload weights in place.

Of the 14 CPU seconds that vLLM needs to start with a tiny model, its imports take 9. The process that a worker starts
therefore imports the engine once and never loads a model. For the first command, and whenever options or the model's
configuration change, it ends its child and forks a new one, which loads the model. Other weights of the same
configuration go to the same child, which loads them in place and verifies that it holds them. A command with `fresh` is
served by a child that never held other weights.

A fork is safe because the parent starts no thread and computes nothing. The parent imports the engine only for a CPU
under Linux: importing it for a GPU may initialise the driver, which does not survive a fork.
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

from foreshock_probes.engines.architecture import model_key
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.engines.serving import EXIT_SECONDS, serve

__all__ = ["serve_with_children"]

_POLL_SECONDS = 0.2
_PRELOADED = {
    "vllm": ("vllm.entrypoints.llm", "foreshock_probes.scorers.vllm_prefill", "foreshock_probes.scorers.vllm_decode")
}


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
            _run_child(engine, read, replies)
        os.close(read)

    def send(self, line: bytes) -> None:
        """Send a command line to the child; if the child has ended, `status` reports it."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, line)

    def status(self) -> int | None:
        """Return the exit code of the child as `os.waitstatus_to_exitcode` does; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end(self) -> None:
        """Wait 10 s for the child to exit, then kill the process group: the child, what it started and this process."""
        os.close(self._commands)
        deadline = time.monotonic() + EXIT_SECONDS
        while self.status() is None:
            if time.monotonic() > deadline:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            time.sleep(0.01)


def serve_with_children(engine: str, requests: int, replies: int) -> int:
    """Serve commands from the file descriptor `requests` until it is closed, each model in a child process.

    If a child ends by itself, this process ends with the same exit status or signal.
    """
    child: _Child | None = None
    model = ""
    held: set[str] = set()  # the digests of all weights that the child was asked to load
    received = b""
    while True:
        if child is not None and (status := child.status()) is not None:
            return _exit_as(status)
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
            requested = model_key(command)
            if child is not None and (requested != model or (command.fresh and held != {command.weights_digest})):
                child.end()
                child = None
            if child is None:
                if command.accelerator == "cpu" and sys.platform == "linux":
                    for name in _PRELOADED.get(engine, ()):
                        importlib.import_module(name)
                child, model, held = _Child(engine, requests, replies), requested, set()
            held.add(command.weights_digest)
            child.send(line + b"\n")


def _run_child(engine: str, requests: int, replies: int) -> None:
    status = 1
    try:
        serve(engine, requests, replies)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Run the exit functions of the engine, which end what it started; skip the rest of Python's slow shutdown.
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_as(status: int) -> int:
    """Return the exit status of this process, or end it by the signal that ended the child."""
    if status < 0:
        os.kill(os.getpid(), -status)
    return status or 1
