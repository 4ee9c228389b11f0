"""Fork a process for each model, for engines that can only reload weights in place.

vLLM needs 9 CPU seconds to start with a tiny model, of which its imports take 7. The process that a worker starts
therefore imports the engine once and never loads a model. For the first command, and whenever options or the model's
configuration change, it ends its child and forks a new one, which loads the model. Other weights of the same
configuration go to the same child, which loads them in place and verifies that it holds them. A command with `fresh` is
served by a child that has never held other weights.

A fork is safe because the parent starts no thread and computes nothing. The parent imports the engine only for a CPU
under Linux: importing it for a GPU may initialise the driver, which does not survive a fork.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

from foreshock_probes.engines.protocol import ScoreCommand, model_key
from foreshock_probes.engines.serving import EXIT_SECONDS, serve

_POLL_SECONDS = 0.2
# vLLM imports the second module only when it starts on a CPU: 1 s of CPU time for each model.
_PRELOADED = {"vllm": ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "foreshock_probes.scorers.vllm_scorers")}


class _Child:
    """A forked process that serves commands for one model."""

    def __init__(self, engine: str, worker: Connection) -> None:
        read, self._commands = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._commands.close()
            _run_child(engine, read, worker)
        read.close()

    def send(self, command: bytes) -> None:
        """Send a command to the child; if the child has ended, `status` reports it."""
        with contextlib.suppress(BrokenPipeError):
            self._commands.send_bytes(command)

    def status(self) -> int | None:
        """Return the exit code of the child as `os.waitstatus_to_exitcode` does; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end(self) -> None:
        """Wait 10 s for the child to exit, then kill the process group: the child, its children and this process."""
        self._commands.close()
        deadline = time.monotonic() + EXIT_SECONDS
        while self.status() is None:
            if time.monotonic() > deadline:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            time.sleep(0.01)


def serve_with_children(engine: str, worker: Connection) -> int:
    """Serve the worker's commands until the connection is closed. Each model is in a child process, which replies.

    If a child ends by itself, this process ends with the same exit status or signal.
    """
    child: _Child | None = None
    model = ""
    held: set[str] = set()  # the digests of all weights that the child was asked to load
    while True:
        if child is not None and (status := child.status()) is not None:
            return _exit_as(status)
        if not worker.poll(_POLL_SECONDS):
            continue
        try:
            message = worker.recv_bytes()
        except (EOFError, OSError):
            if child is not None:
                child.end()
            return 0
        command = ScoreCommand.model_validate_json(message)
        requested = model_key(command)
        if child is not None and (requested != model or (command.fresh and held != {command.weights_digest})):
            child.end()
            child = None
        if child is None:
            if command.accelerator == "cpu" and sys.platform == "linux":
                _preload(engine)
            child, model, held = _Child(engine, worker), requested, set()
        held.add(command.weights_digest)
        child.send(message)


def _preload(engine: str) -> None:
    """Import the engine, and exclude its objects from garbage collection: vLLM collects all five times at its start."""
    gc.disable()
    for name in _PRELOADED.get(engine, ()):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _run_child(engine: str, requests: Connection, replies: Connection) -> None:
    status = 1
    try:
        serve(engine, requests, replies)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Run the engine's exit functions, which end its processes; skip the rest of Python's slow shutdown.
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_as(status: int) -> int:
    """Return the exit status for this process, or end this process by the signal that ended the child."""
    if status < 0:
        os.kill(os.getpid(), -status)
    return status or 1
