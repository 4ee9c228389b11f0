"""The pool of decoders: spawned processes with a memory limit and an alarm, replaced when one dies or has done enough.

A body that kills its decoder (out of memory, a crash in native code) is tried once more, since the pool is shared and
the death may have been another body's; then it is refused. The service itself goes on.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from service.platform.decoding.token_pass import COMPILED, chosen_token_pass
from service.platform.decoding.worker import prepare_process, run_with_alarm, wait_a_moment
from service.platform.problem import ProblemError
from service.platform.settings import Settings

_logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_TRIES = 2


class DecoderDied(ProblemError):
    """The process that decoded this body was killed, twice: by the memory limit, the time limit or a crash."""

    status = 503


class DecodersBusy(ProblemError):
    """More bodies wait for a decoder than the service wants to hold."""

    status = 503


@dataclass(eq=False, slots=True)
class _Generation:
    executor: ProcessPoolExecutor
    started: int = 0


class DecoderPool:
    """Runs module-level functions in other processes, which import `preload` when they start. Thread-safe."""

    def __init__(self, settings: Settings, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._settings = settings
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(settings.decode_processes + settings.decode_queue)
        self._choice = chosen_token_pass(settings)
        self._generation = self._new_generation()
        self._state = "starting"
        if self._choice.compile:
            self._state += ": the first start of a release compiles the pass over tokens, which takes about a minute"
        self._token_pass = ""
        self._closing = False

    @property
    def is_warm(self) -> bool:
        """Whether the decoders have started."""
        return self._state == "ok"

    @property
    def state(self) -> str:
        """`ok`, or what the decoders wait for."""
        return self._state

    @property
    def token_pass(self) -> str:
        """What measures tokens: `compiled`, or numpy and why; empty until the decoders have started."""
        return self._token_pass

    def warm_up(self) -> None:
        """Start every process now, so that the first upload does not wait for it."""
        executor = self._generation.executor
        try:
            futures = [executor.submit(wait_a_moment) for _ in range(self._settings.decode_processes)]
            if self._closing:
                self._kill_starting()
            self._token_pass = min((future.result() for future in futures), key=lambda found: found == COMPILED)
        except Exception as error:
            self._state = f"failed: {type(error).__name__}"
            raise
        self._state = "ok"
        if self._choice.compile and self._token_pass != COMPILED:
            _logger.warning("tokens are measured by %s", self._token_pass)

    def warm_up_in_background(self) -> None:
        """Begin `warm_up`; meanwhile `state` says that the decoders start, and what is run waits for them."""

        def warm_up() -> None:
            try:
                self.warm_up()
            except Exception:
                if not self._closing:
                    _logger.exception("the decoders do not start")

        threading.Thread(target=warm_up, name="foreshock-warm-up", daemon=True).start()

    def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """`function(*arguments)` in a decoder; raises what it raises, DecodersBusy or DecoderDied."""
        if not self._places.acquire(blocking=False):
            raise DecodersBusy("too many uploads wait to be decoded: try again", headers={"Retry-After": "1"})
        try:
            task = partial(function, *arguments, **named)
            for _ in range(_TRIES):
                generation, future = self._submit(task)
                try:
                    return future.result()
                except BrokenProcessPool:
                    self._replace(generation)
        finally:
            self._places.release()
        raise DecoderDied(
            "the process that decoded this body died (memory, time or a damaged file): send smaller shards",
            headers={"Retry-After": "5"},
        )

    def close(self) -> None:
        """End the processes once they have finished what they do; those that only start are ended at once."""
        self._closing = True
        if not self.is_warm:
            self._kill_starting()
        self._generation.executor.shutdown(wait=True, cancel_futures=True)

    def _kill_starting(self) -> None:
        """Nothing is lost with a process that compiles, and nobody who stops the service wants to wait for it."""
        # Executors have no public way to do so before Python 3.14.
        processes = getattr(self._generation.executor, "_processes", None) or {}
        for process in list(processes.values()):
            process.kill()

    def _submit(self, task: Callable[[], Result]) -> tuple[_Generation, Future[Result]]:
        # Under the lock, so that nobody ends the generation between choosing it and submitting to it.
        with self._lock:
            if self._generation.started >= self._settings.decode_recycle_after:
                # What it still works on is finished; native libraries' leaks end with it.
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
        return _Generation(
            ProcessPoolExecutor(
                self._settings.decode_processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=prepare_process,
                initargs=(self._settings.decode_memory_bytes, self._choice, self._preload),
            )
        )
