"""Decoder processes with a pipe each: the thread that has a task sends it and receives the result itself.

A pool of `concurrent.futures` hands each task and each result through two threads and two queues: milliseconds of CPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from foreshock_service.platform.decoding.token_pass import TokenPassChoice, token_pass
from foreshock_service.platform.decoding.worker import prepare_process, run_with_alarm

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings

Result = TypeVar("Result")

# Arrow's allocator reserves address space in arenas, by default of 1 GiB: with 1 GiB allowed, the first took it all.
_ARENA_BYTES = ("MIMALLOC_ARENA_RESERVE", "64MiB")


class ProcessDied(Exception):
    """A process ended before its result came."""


class _RemoteTraceback(Exception):
    """The traceback of an error in a decoder, as text."""


class _Decoder:
    """A process, once it is started; used by one thread at a time."""

    def __init__(self, settings: Settings, choice: TokenPassChoice, preload: Sequence[str]) -> None:
        self.choice = choice
        self._limits = (settings.decode_timeout_seconds, settings.decode_memory_bytes)
        self._preload = tuple(preload)
        self._started_with = choice
        self._most_tasks = settings.decode_recycle_after
        self._tasks = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._token_pass: str | None = None

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        # Inherited: it must be set before the process loads Arrow.
        os.environ.setdefault(*_ARENA_BYTES)
        own, other = context.Pipe()
        choice = self.choice
        process = context.Process(target=_serve, args=(other, *self._limits, choice, self._preload), daemon=True)
        try:
            process.start()
        except BaseException:
            own.close()
            raise
        finally:
            # The end of the process is then the end of the pipe.
            other.close()
        self._process, self._connection, self._token_pass, self._tasks = process, own, None, 0
        self._started_with = choice

    def renew(self) -> None:
        """Start the process again with the choice that now holds, if it runs."""
        if self._process is not None and self._started_with != self.choice:
            self.stop()
            self.ready()

    def ready(self) -> str:
        """Wait until the process has imported what it needs; return its token pass."""
        self.start()
        if self._token_pass is None:
            self._token_pass = str(self._exchange(None))
        return self._token_pass

    def run(self, task: Callable[[], Result]) -> Result:
        """Return the result of the task, or raise its error; raises ProcessDied."""
        if self._tasks >= self._most_tasks or self._started_with != self.choice:
            # Memory that native libraries leaked is freed with the process.
            self.stop()
        self.ready()
        self._tasks += 1
        is_result, value, text = self._exchange(pickle.dumps(task))
        if is_result:
            result: Result = value
            return result
        raise value from _RemoteTraceback(f'\n"""\n{text}"""')

    def kill_starting(self) -> None:
        """End a process that still starts. Called from another thread: its own one sees that it died."""
        if self._process is not None and self._token_pass is None:
            self._process.kill()

    def stop(self, *, kill: bool = False) -> None:
        """End the process, which has no task."""
        process, connection = self._process, self._connection
        self._process = self._connection = self._token_pass = None
        if connection is not None:
            connection.close()
        if process is not None:
            if kill:
                process.kill()
            process.join()

    def _exchange(self, message: bytes | None) -> Any:
        connection = self._connection
        assert connection is not None, "start comes first"
        try:
            if message is not None:
                connection.send_bytes(message)
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.stop(kill=True)
            raise ProcessDied("the decoder died") from error
        return pickle.loads(answer)


class DecoderProcesses:
    """Some decoders; each task has one for itself. Thread-safe."""

    def __init__(self, processes: int, settings: Settings, choice: TokenPassChoice, preload: Sequence[str]) -> None:
        self._decoders = [_Decoder(settings, choice, preload) for _ in range(processes)]
        # The last one that was used is the next one: its caches are warm.
        self._idle: queue.LifoQueue[_Decoder | None] = queue.LifoQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._closing = threading.Event()

    def warm_up(self) -> list[str]:
        """Start every process and wait for it; return their token passes. Raises ProcessDied."""
        taken = [self._take() for _ in self._decoders]
        try:
            for decoder in taken:
                decoder.start()
            if self._closing.is_set():
                self.kill_starting()
            return [decoder.ready() for decoder in taken]
        finally:
            for decoder in taken:
                self._idle.put(decoder)

    def renew(self, choice: TokenPassChoice) -> None:
        """Replace the processes: an idle one now, one at a time, and a busy one before its next task."""
        for decoder in self._decoders:
            decoder.choice = choice
        for decoder in self._decoders:
            if self._take_if_idle(decoder):
                try:
                    decoder.renew()
                finally:
                    self._idle.put(decoder)

    def run(self, task: Callable[[], Result]) -> Result:
        """Return the result of the task, or raise its error, once a decoder is idle; raises ProcessDied."""
        decoder = self._take()
        try:
            return decoder.run(task)
        finally:
            self._idle.put(decoder)

    def kill_starting(self) -> None:
        """End the processes that still start: they have no task, and stopping must not wait for compilation."""
        self._closing.set()
        for decoder in self._decoders:
            decoder.kill_starting()

    def close(self) -> None:
        """End the processes after their current tasks."""
        self._closing.set()
        for decoder in [self._take() for _ in self._decoders]:
            decoder.stop()
        self._idle.put(None)

    def _take_if_idle(self, wanted: _Decoder) -> bool:
        """Take this decoder if it has no task."""
        taken: list[_Decoder | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._idle.get_nowait())
        for decoder in reversed(taken):
            if decoder is not wanted:
                self._idle.put(decoder)
        return wanted in taken

    def _take(self) -> _Decoder:
        decoder = self._idle.get()
        if decoder is None:
            # For the next one that asks.
            self._idle.put(None)
            raise RuntimeError("the decoders are closed")
        return decoder


def _serve(
    connection: Connection, seconds: float, memory_bytes: int, choice: TokenPassChoice, preload: Sequence[str]
) -> None:
    """Run tasks until the pipe ends; the first message is the token pass."""
    prepare_process(memory_bytes, choice, preload)
    connection.send_bytes(pickle.dumps(token_pass()))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message, seconds))


def _answer(message: bytes, seconds: float) -> bytes:
    try:
        return pickle.dumps((True, run_with_alarm(seconds, pickle.loads(message)), ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return pickle.dumps((False, error, text))
        except Exception:
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), text))
