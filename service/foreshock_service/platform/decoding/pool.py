"""The pool of decoders: spawned processes with limits on memory and time, replaced after a crash or when it has grown.

Each decoder is an executor of one process, so that a body that breaks its decoder affects no other upload. If a decoder
dies (out of memory, out of time, a crash in native code), its body is tried once more in a new process. If that dies
too, the body is the cause and is refused. The other decoders decode the other uploads meanwhile.

The next body is that of the key with the least recent decoding time. So one key's heavy bodies (60 M constant tokens
are 5 kB, and take seconds to decode) delay another key's body by at most one body. While another key is active, a key
that already uses a decoder does not get the last free one.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from foreshock.retry import Backoff, retry
from foreshock_service.platform import problem
from foreshock_service.platform.decoding import worker
from foreshock_service.platform.settings import Settings

_logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Place = TypeVar("Place")

decoding_key: ContextVar[str | None] = ContextVar("decoding_key", default=None)
"""The key of the upload that this code serves; None: the service's own work."""

# A start fails if the process is killed, for example by the kernel when memory runs out.
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
_TRIES = 2
# Of the decoding time of a key, and without an upload until a key is no longer active.
_HALF_LIFE_SECONDS, _ACTIVE_SECONDS = 60.0, 600.0
# Inherited by decoders. Arrow's allocator reserves address space in arenas, of 1 GiB by default, and so uses up a limit
# of 1 GiB. By default the C library returns large arrays at once: the page faults took a fifth of a step's CPU time.
_ALLOCATORS = {
    "MIMALLOC_ARENA_RESERVE": "64MiB",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class DecoderDied(problem.ProblemError, status=413, problem_type="decoder-died"):
    """A body that ends the process which decodes it, twice: by the memory limit, the time limit or a crash."""

    # 413, since the body is at fault and not the service: a client sends the items behind it first.


class DecodersBusy(problem.ProblemError, status=503, problem_type="decoders-busy"):
    """A full queue of bodies that wait for a decoder."""


class _Decoder:
    """One process, started on demand; used by one thread at a time."""

    def __init__(self, settings: Settings, preload: Sequence[str]) -> None:
        self._settings = settings
        self._preload = tuple(preload)
        self._executor: ProcessPoolExecutor | None = None
        self._grown = 0
        self._token_pass = ""

    def start(self) -> str:
        """Start the process unless it runs, and return its token pass once it is ready. Raises BrokenProcessPool."""
        if self._executor is None:
            for name, value in _ALLOCATORS.items():
                os.environ.setdefault(name, value)
            spawning = multiprocessing.get_context("spawn")
            arguments = (self._settings.token_pass, self._preload)
            self._executor = ProcessPoolExecutor(1, spawning, worker.prepare_process, arguments)
            self._grown = 0
        if not self._token_pass:
            self._token_pass = self._executor.submit(worker.report_token_pass).result()
        return self._token_pass

    def run(self, task: Callable[[], Result]) -> Result:
        """Return the result of the task, or raise its error. Raises BrokenProcessPool if the process dies."""
        settings = self._settings
        try:
            self.start()
            assert self._executor is not None
            try:
                result, grown = self._executor.submit(
                    worker.run_task, settings.decode_timeout_seconds, settings.decode_memory_bytes, task
                ).result()
                self._grown += grown
                return result
            finally:
                # Memory that native libraries keep or leak is freed with the process.
                if self._grown > settings.decode_memory_bytes // 2:
                    self.stop()
        except BrokenProcessPool:
            self.stop()
            raise

    def stop(self, *, wait: bool = False) -> None:
        """End the process; it must have no task."""
        if self._executor is not None:
            self._executor.shutdown(wait=wait)
        self._executor, self._token_pass = None, ""

    def kill(self) -> None:
        """Kill the process, even while it starts. May be called in any thread."""
        executor = self._executor
        for process in list((executor._processes or {}).values()) if executor is not None else []:
            process.kill()


class Turns(Generic[Place]):
    """Places that are given out one at a time, in a fair order of keys. Thread-safe."""

    def __init__(self, places: Sequence[Place], clock: Callable[[], float] = time.monotonic) -> None:
        self._idle = list(places)
        self._clock = clock
        self._changed = threading.Condition()
        # Ticket → key of each waiting thread, in the order of arrival.
        self._waiting: dict[object, str | None] = {}
        self._running: Counter[str | None] = Counter()
        # Key → (seconds of decoding, which halve each minute; the time when they were counted).
        self._used: dict[str | None, tuple[float, float]] = {}
        self._closed = False

    def take(self, key: str | None = None) -> Place:
        """Wait for the key's turn and return a place. Raises RuntimeError once closed."""
        ticket = object()
        with self._changed:
            self._waiting[ticket] = key
            try:
                self._changed.wait_for(lambda: self._closed or self._next() is ticket)
                if self._closed:
                    raise RuntimeError("the decoders are closed")
                self._running[key] += 1
                # The most recently used place: its caches are warm.
                return self._idle.pop()
            finally:
                del self._waiting[ticket]
                self._changed.notify_all()

    def give(self, place: Place, key: str | None = None, seconds: float = 0.0) -> None:
        """Give back a place that the key used for `seconds`."""
        with self._changed:
            self._idle.append(place)
            self._running[key] -= 1
            self._used[key] = (self._recent(key) + seconds, self._clock())
            self._changed.notify_all()

    def close(self) -> None:
        """Make every waiting and later `take` raise RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> object | None:
        able = [ticket for ticket, key in self._waiting.items() if self._idle and self._may_take(key)]
        # Of equals the first one wins: it came first.
        return min(able, key=lambda ticket: self._recent(self._waiting[ticket]), default=None)

    def _may_take(self, key: str | None) -> bool:
        if key is None or len(self._idle) > 1 or not self._running[key]:
            return True
        since = self._clock() - _ACTIVE_SECONDS
        others = [at for other, (_, at) in self._used.items() if other not in (key, None)]
        return not any(at > since for at in others) and all(other in (key, None) for other in self._waiting.values())

    def _recent(self, key: str | None) -> float:
        seconds, at = self._used.get(key, (0.0, 0.0))
        return seconds * math.exp2((at - self._clock()) / _HALF_LIFE_SECONDS)


class DecoderPool:
    """Pool that runs module-level functions in other processes, which import `preload` when they start. Thread-safe."""

    def __init__(self, settings: Settings, preload: Sequence[str] = ()) -> None:
        # Of the bodies that are decoded or wait for a decoder.
        self._places = threading.BoundedSemaphore(settings.decode_processes + settings.decode_queue)
        self._decoders = [_Decoder(settings, preload) for _ in range(settings.decode_processes)]
        self._turns = Turns(self._decoders)
        self.state = "starting"
        """State of the decoders: `ok`, or the reason why they are not ready."""
        self.token_pass = ""
        """Token pass of the decoders: `compiled`, or numpy and the reason; empty until they have started."""
        self._wants_compiled = settings.token_pass == worker.COMPILED
        self._warming: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def is_warm(self) -> bool:
        return self.state == "ok"

    def warm_up(self) -> None:
        """Start every process now, one after the other: the first one compiles, if necessary, and the others load."""
        taken: list[_Decoder] = []
        try:
            taken.extend(self._turns.take() for _ in self._decoders)
            passes = [decoder.start() for decoder in taken]
        except Exception as error:
            self.state = f"failed: {type(error).__name__}"
            for decoder in taken:
                decoder.stop()
            raise
        finally:
            for decoder in taken:
                self._turns.give(decoder)
        self.token_pass = min(passes, key=lambda found: found == worker.COMPILED)
        self.state = "ok"
        if self._wants_compiled and self.token_pass != worker.COMPILED:
            _logger.warning("tokens are measured by %s", self.token_pass)

    def warm_up_in_background(self) -> None:
        """Run `warm_up` in a thread, again if it fails. Until it succeeds tasks wait, and `state` gives the reason."""

        def report(error: Exception, delay: float) -> None:
            _logger.error("the decoders do not start; the next try is in %.0f s", delay, exc_info=error)

        def start() -> None:
            # `retry` raises the last error once the pool is closing.
            with contextlib.suppress(Exception):
                retry(
                    self.warm_up,
                    Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS),
                    is_retryable=lambda _: not self._closing.is_set(),
                    wait=self._closing.wait,
                    on_retry=report,
                )

        self._warming = threading.Thread(target=start, name="foreshock-warm-up", daemon=True)
        self._warming.start()

    def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Return `function(*arguments)`, run in a decoder; raises its errors, DecodersBusy or DecoderDied."""
        if not self._places.acquire(blocking=False):
            raise DecodersBusy("too many uploads wait to be decoded: try again", headers={"Retry-After": "1"})
        try:
            key = decoding_key.get()
            decoder = self._turns.take(key)
            begin = time.monotonic()
            try:
                for _ in range(_TRIES):
                    with contextlib.suppress(BrokenProcessPool):
                        return decoder.run(partial(function, *arguments, **named))
            finally:
                self._turns.give(decoder, key, time.monotonic() - begin)
        finally:
            self._places.release()
        raise DecoderDied(
            "the process that decoded this body died, and so did the next one (memory, time or a damaged file): send "
            "smaller shards",
            headers={"Retry-After": "60"},
        )

    def close(self) -> None:
        """End the processes after their current tasks; those that still start, and may compile, are killed."""
        self._closing.set()
        while self._warming is not None and self._warming.is_alive():
            for decoder in self._decoders:
                decoder.kill()
            self._warming.join(0.1)
        for decoder in [self._turns.take() for _ in self._decoders]:
            decoder.stop(wait=True)
        self._turns.close()
