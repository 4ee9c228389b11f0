"""Fork a process for each model, for engines that can only reload weights in place.

Of the 14 CPU seconds that vLLM needs to start with a tiny model, its imports take 9. The process that a worker starts
therefore imports the engine once and never loads a model. For the first command, and whenever weights or options
change, it ends its child and forks a new one, which loads the model. A child never sees other weights than its own,
unless commands ask for weights to be loaded in place (`ScoreCommand.in_place_of`): it then serves such commands only.

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

from foreshock.digests import canonical_json
from probes.engines.protocol import LoadedWeights, ScoreCommand
from probes.engines.serving import EXIT_SECONDS, serve

__all__ = ["serve_with_children"]

_POLL_SECONDS = 0.2
_PRELOADED = {"vllm": ("vllm.entrypoints.llm", "probes.scorers.vllm_prefill")}


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
            requested = _model_key(command)
            if child is not None and command.in_place_of is not None and model == _started_key(command):
                model = requested  # Its weights are exchanged in place: it serves no other command from now on.
            if child is not None and requested != model:
                child.end()
                child = None
            if child is None:
                if command.accelerator == "cpu" and sys.platform == "linux":
                    for name in _PRELOADED.get(engine, ()):
                        importlib.import_module(name)
                child, model = _Child(engine, requests, replies), requested
            child.send(line + b"\n")


def _model_key(command: ScoreCommand) -> str:
    """Return a key that is equal for commands that one child can serve."""
    if command.in_place_of is not None:
        return f"in place of {_started_key(command)}"
    return _started_key(command)


def _started_key(command: ScoreCommand) -> str:
    """Return the key of commands that score with the weights that the engine is started with."""
    held = command.in_place_of or LoadedWeights(folder=command.weights_folder, digest=command.weights_digest)
    return canonical_json([held.folder, held.digest, command.options, command.accelerator])


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
