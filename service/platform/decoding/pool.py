"""The pool of decoders: spawned processes with limits on memory and time, replaced after a crash or a number of tasks.

When a decoder dies (out of memory, out of time, a crash in native code), the bodies that were in the pool are tried
once more, one after the other in a process that no other body shares: the one whose process dies again is the cause,
and is refused. The others are decoded, and so is everything that arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from foreshock.retry import Backoff, retry
from service.platform.decoding.token_pass import COMPILED, chosen_token_pass
from service.platform.decoding.worker import prepare_process, run_with_alarm, wait_a_moment
from service.platform.logs.tracing import span
from service.platform.problem import ProblemError
from service.platform.settings import Settings

_logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# A start fails if a starting process is killed, such as by the kernel on a machine without memory.
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0


class DecoderDied(ProblemError):
    """A body that ends the process which decodes it, also alone: by the memory limit, the time limit or a crash."""

    # Of this body, not of the service: a client sends what is behind it first.
    status = 413
    problem_type = "decoder-died"


class DecodersBusy(ProblemError):
    """A full queue of bodies that wait for a decoder."""

    status = 503
    problem_type = "decoders-busy"


@dataclass(eq=False, slots=True)
class _Generation:
    executor: ProcessPoolExecutor
    started: int = 0


class DecoderPool:
    """Pool that runs module-level functions in other processes, which import `preload` when they start. Thread-safe."""

    def __init__(self, settings: Settings, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._settings = settings
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(settings.decode_processes + settings.decode_queue)
        self._most_bodies = settings.decode_processes + settings.decode_queue
        self._bodies = 0
        self._choice = chosen_token_pass(settings)
        self._generation = self._new_generation()
        # The process of tasks that were in the pool when a decoder died; held by one at a time.
        self._suspects = threading.Lock()
        self._alone: ProcessPoolExecutor | None = None
        self._state = "starting"
        if self._choice.compile:
            self._state += ": the first start of a release compiles the pass over tokens, which takes about a minute"
        self._token_pass = ""
        self._closing = threading.Event()

    @property
    def is_warm(self) -> bool:
        """Return True if the decoders have started."""
        return self._state == "ok"

    @property
    def state(self) -> str:
        """State of the decoders: `ok`, or the reason why they are not ready."""
        return self._state

    @property
    def token_pass(self) -> str:
        """Token pass of the decoders: `compiled`, or numpy and the reason; empty until they have started."""
        return self._token_pass

    @property
    def bodies(self) -> int:
        """Number of bodies that are decoded or wait for a decoder."""
        return self._bodies

    @property
    def most_bodies(self) -> int:
        """Number of bodies that may be decoded or wait at a time."""
        return self._most_bodies

    def warm_up(self) -> None:
        """Start every process now, so that the first upload does not wait for it."""
        executor = self._generation.executor
        try:
            futures = [executor.submit(wait_a_moment) for _ in range(self._settings.decode_processes)]
            if self._closing.is_set():
                self._kill_starting()
            self._token_pass = min((future.result() for future in futures), key=lambda found: found == COMPILED)
        except Exception as error:
            self._state = f"failed: {type(error).__name__}"
            raise
        self._state = "ok"
        if self._choice.compile and self._token_pass != COMPILED:
            _logger.warning("tokens are measured by %s", self._token_pass)

    def warm_up_in_background(self) -> None:
        """Start `warm_up` in a thread; until it ends `state` reports it, and tasks wait. It is repeated if it fails."""

        def start_again(error: Exception, delay: float) -> None:
            _logger.error("the decoders do not start; the next try is in %.0f s", delay, exc_info=error)
            with self._lock:
                self._renew()

        def warm_up() -> None:
            # The last error is that of closing.
            with contextlib.suppress(Exception):
                retry(
                    self.warm_up,
                    Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS),
                    is_retryable=lambda _: not self._closing.is_set(),
                    wait=self._closing.wait,
                    on_retry=start_again,
                )

        threading.Thread(target=warm_up, name="foreshock-warm-up", daemon=True).start()

    def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Return `function(*arguments)`, run in a decoder; raises its errors, DecodersBusy or DecoderDied."""
        if not self._places.acquire(blocking=False):
            raise DecodersBusy("too many uploads wait to be decoded: try again", headers={"Retry-After": "1"})
        with self._lock:
            self._bodies += 1
        try:
            task = partial(function, *arguments, **named)
            with span("decode"):
                generation, future = self._submit(task)
                try:
                    return future.result()
                except BrokenProcessPool:
                    self._replace(generation)
                return self._run_alone(task)
        finally:
            with self._lock:
                self._bodies -= 1
            self._places.release()

    def close(self) -> None:
        """End the processes after their current tasks; those that are still starting are ended at once."""
        self._closing.set()
        if not self.is_warm:
            self._kill_starting()
        self._generation.executor.shutdown(wait=True, cancel_futures=True)
        if self._alone is not None:
            self._alone.shutdown(wait=True, cancel_futures=True)

    def _run_alone(self, task: Callable[[], Result]) -> Result:
        """Run a task in a process that no other task shares; raises DecoderDied if the process dies."""
        with self._suspects:
            if self._alone is None:
                self._alone = self._new_executor(1)
            try:
                return self._alone.submit(run_with_alarm, self._settings.decode_timeout_seconds, task).result()
            except BrokenProcessPool as error:
                self._alone.shutdown(wait=False)
                self._alone = None
                raise DecoderDied(
                    "the process that decoded this body died, also when it decoded nothing else (memory, time or a "
                    "damaged file): send smaller shards",
                    headers={"Retry-After": "60"},
                ) from error

    def _kill_starting(self) -> None:
        """End the processes that still start: they hold no task, and stopping must not wait for compilation."""
        # Executors have no public way to do so before Python 3.14.
        processes = getattr(self._generation.executor, "_processes", None) or {}
        for process in list(processes.values()):
            process.kill()

    def _submit(self, task: Callable[[], Result]) -> tuple[_Generation, Future[Result]]:
        # Under the lock, so that the executor is not shut down between choosing it and submitting to it.
        with self._lock:
            if self._generation.started >= self._settings.decode_recycle_after:
                # Running tasks are finished; memory that native libraries leaked is freed with the processes.
                self._renew()
            seconds = self._settings.decode_timeout_seconds
            try:
                future = self._generation.executor.submit(run_with_alarm, seconds, task)
            except BrokenProcessPool:
                self._renew()
                future = self._generation.executor.submit(run_with_alarm, seconds, task)
            self._generation.started += 1
            return self._generation, future

    def _replace(self, broken: _Generation) -> None:
        with self._lock:
            if self._generation is broken:
                self._renew()

    def _renew(self) -> None:
        self._generation.executor.shutdown(wait=False)
        self._generation = self._new_generation()

    def _new_generation(self) -> _Generation:
        return _Generation(self._new_executor(self._settings.decode_processes))

    def _new_executor(self, processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=prepare_process,
            initargs=(self._settings.decode_memory_bytes, self._choice, self._preload),
        )
