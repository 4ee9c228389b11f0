"""A child process with framed messages. It has its own process group, and is killed with its group.

Messages are bytes, framed by a `multiprocessing.connection.Connection`, and received with a deadline. Engines and their
libraries write to standard output, so it goes to a log; the error for a child that died includes the end of this log.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

_SECONDS_TO_LEAVE = 5.0
_LOG_TAIL_BYTES = 16_384
_LOG_TAIL_LINES = 12


class ChildEndedError(Exception):
    """The child ended by itself; the message says how, with the end of its log."""


class ChildProcess:
    """A process that runs `module` with `arguments` and `--connection FD`; its output goes to the file `log`."""

    def __init__(self, module: str, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._connection, its = multiprocessing.Pipe()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments, "--connection", str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(its.fileno(),),
                    env=variables,
                    start_new_session=True,  # a process group of its own, so that its children are ended too
                )
        except OSError:
            self._connection.close()
            raise
        finally:
            its.close()

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    @property
    def connection(self) -> Connection:
        """The connection, for `multiprocessing.connection.wait`; it is also ready if the child has ended."""
        return self._connection

    def alive(self) -> bool:
        """Return True if the process runs and was not closed."""
        return not self._connection.closed and self._process.poll() is None

    def send(self, message: bytes) -> None:
        """Send a message. Raises ChildEndedError."""
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message, None if there is none within `seconds`. Raises ChildEndedError."""
        try:
            return self._connection.recv_bytes() if self._connection.poll(seconds) else None
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def close(self) -> None:
        """End the process and its children: wait up to 5 s for its exit, then kill them."""
        if not self._connection.closed:
            self._connection.close()  # the process exits when its connection is closed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_LEAVE)
            self._kill_group()

    def kill(self) -> None:
        """Kill the process and its children immediately."""
        if not self._connection.closed:
            self._connection.close()
            self._kill_group()

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return "\n".join(line[:400] for line in lines[-_LOG_TAIL_LINES:])

    def _ended(self) -> ChildEndedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_LEAVE)
        how, tail = _how_it_ended(self._process.poll()), self.log_tail()
        self.kill()
        return ChildEndedError(f"{how}; the end of its log:\n{tail}")

    def _kill_group(self) -> None:
        # The group may outlive its leader: an engine may have workers of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def connection_to_parent(descriptor: int) -> Connection:
    """Return the child's end of the connection of a `ChildProcess`; the child's own children do not inherit it."""
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def messages_of_parent(connection: Connection, seconds_to_leave: float) -> Iterator[bytes]:
    """Receive the parent's messages from now on, and return them until the parent closes the connection.

    If this process still runs `seconds_to_leave` after that, it is killed with its process group, because the parent no
    longer waits for it.
    """
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv_bytes())
        messages.put(None)
        time.sleep(seconds_to_leave)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    return iter(messages.get, None)


def _how_it_ended(status: int | None) -> str:
    """Return how a process with this status ended; None: it still runs, but has closed its connection."""
    if status is None:
        return "closed its pipe"
    if status >= 0:
        return f"exited with status {status}"
    hint = " (signal 9 is often the system's out-of-memory killer)" if status == -signal.SIGKILL else ""
    return f"was ended by signal {-status}{hint}"
