"""The pool of decoders: spawned processes with limits on memory and time, replaced after a crash or a number of tasks.

When a decoder dies (out of memory, out of time, a crash in native code), its body is tried once more, in a process that
no other body shares: if that dies too, the body is the cause, and is refused. What arrives meanwhile is decoded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from foreshock.retry import Backoff, retry
from foreshock_service.platform.decoding.compiling import Compiler
from foreshock_service.platform.decoding.processes import DecoderProcesses, ProcessDied
from foreshock_service.platform.decoding.token_pass import COMPILED, chosen_token_pass, first_choice
from foreshock_service.platform.logs.tracing import span
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.settings import Settings

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


class DecoderPool:
    """Pool that runs module-level functions in other processes, which import `preload` when they start. Thread-safe."""

    def __init__(self, settings: Settings, preload: Sequence[str] = ()) -> None:
        self._places = threading.BoundedSemaphore(settings.decode_processes + settings.decode_queue)
        self._most_bodies = settings.decode_processes + settings.decode_queue
        self._bodies = 0
        self._choice = chosen_token_pass(settings)
        first = first_choice(self._choice)
        self._must_compile = first.for_now
        self._compiler = Compiler()
        self._processes = DecoderProcesses(settings.decode_processes, settings, first, preload)
        self._lock = threading.Lock()
        # The process of tasks whose decoder died, started with the first one; held by one at a time.
        self._suspects = threading.Lock()
        self._alone = DecoderProcesses(1, settings, first, preload)
        self._state = "starting"
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
        """Token pass of the decoders: `compiled`, or numpy and the reason; empty until they have started.

        At the first start of a release it is numpy's until the pass is compiled.
        """
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
        try:
            self._token_pass = min(self._processes.warm_up(), key=lambda found: found == COMPILED)
        except Exception as error:
            self._state = f"failed: {type(error).__name__}"
            raise
        self._state = "ok"
        if self._choice.compile and self._token_pass != COMPILED:
            log = _logger.info if self._must_compile else _logger.warning
            log("tokens are measured by %s", self._token_pass)

    def warm_up_in_background(self) -> None:
        """Start `warm_up` in a thread; until it ends `state` reports it, and tasks wait. It is repeated if it fails.

        Then the pass over tokens is compiled, if it must be, and the decoders are replaced by some that use it.
        """

        def start_again(error: Exception, delay: float) -> None:
            _logger.error("the decoders do not start; the next try is in %.0f s", delay, exc_info=error)

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
                if self._must_compile:
                    self._compile()

        threading.Thread(target=warm_up, name="foreshock-warm-up", daemon=True).start()

    def _compile(self) -> None:
        try:
            found = self._compiler.compile(self._choice)
        except (EOFError, OSError):
            if not self._closing.is_set():
                self._token_pass = "numpy, several times slower: the process that compiles died"
                _logger.exception("tokens are measured by %s", self._token_pass)
            return
        if found == COMPILED:
            self._processes.renew(self._choice)
            self._alone.renew(self._choice)
        else:
            _logger.warning("tokens are measured by %s", found)
        self._token_pass = found

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
                try:
                    return self._processes.run(task)
                except ProcessDied:
                    return self._run_alone(task)
        finally:
            with self._lock:
                self._bodies -= 1
            self._places.release()

    def close(self) -> None:
        """End the processes after their current tasks; those that are still starting are ended at once."""
        self._closing.set()
        self._compiler.stop()
        if not self.is_warm:
            self._processes.kill_starting()
        self._processes.close()
        self._alone.close()

    def _run_alone(self, task: Callable[[], Result]) -> Result:
        """Run a task in a process that no other task shares; raises DecoderDied if the process dies."""
        with self._suspects:
            try:
                return self._alone.run(task)
            except ProcessDied as error:
                raise DecoderDied(
                    "the process that decoded this body died, also when it decoded nothing else (memory, time or a "
                    "damaged file): send smaller shards",
                    headers={"Retry-After": "60"},
                ) from error
