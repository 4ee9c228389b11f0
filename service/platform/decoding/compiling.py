"""Compile the pass over tokens in a process of its own, while decoders use numpy's."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection

from foreshock_service.platform.decoding.token_pass import TokenPassChoice, prepare_token_pass, token_pass
from foreshock_service.platform.parent_process import end_with_parent

# Uploads come first.
_NICENESS = 10


class Compiler:
    """One process that compiles. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._is_stopped = False

    def compile(self, choice: TokenPassChoice) -> str:
        """Compile and keep the machine code; return the pass that is then available, as `token_pass` does.

        Raises EOFError if the process dies or is stopped.
        """
        context = multiprocessing.get_context("spawn")
        own, other = context.Pipe(duplex=False)
        with self._lock:
            if self._is_stopped:
                raise EOFError("stopped")
            self._process = context.Process(target=_compile, args=(other, choice), daemon=True)
            self._process.start()
        other.close()
        with own:
            found = str(own.recv())
        self._process.join()
        return found

    def stop(self) -> None:
        """End the process, also while it compiles."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.join()


def _compile(connection: Connection, choice: TokenPassChoice) -> None:
    end_with_parent()
    os.nice(_NICENESS)
    prepare_token_pass(choice)
    connection.send(token_pass())
