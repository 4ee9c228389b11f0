"""The background of one client: two threads with the spool between them, and their end.

    trainer ── a bounded queue ──> encoder's thread ── Spool (a folder) ──> sender's thread ──> service

The encoder writes each item into the spool, and the sender sends what is there. Encoding has a thread of its own so
that a service that is silent for a minute does not keep a minute of steps in memory only, where a kill would lose them.

`concurrent.futures.thread` is imported for encoding at the end of the process: pyarrow then imports pandas, if it is
installed, and pandas imports this module, which Python refuses to load so late.

In a forked child it is disabled (its threads live in the parent): items logged there are counted as dropped.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from foreshock.client.connection import run_url
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.reporting import Counters, DeliveryStatus, LogOnce
from foreshock.client.sender import Sender
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import Spool
from foreshock.errors import RolloutsError, ServiceError, WeightsError

_SECONDS_BETWEEN_ADVICE_POLLS = 5.0

Make = Callable[[], Delivery]
"""A function that encodes an item."""


@dataclass(frozen=True, slots=True)
class _Work:
    """One captured item: `make` encodes it. It is slow if it reads gigabytes: it must not delay the items behind it."""

    what: str
    size: int
    make: Make
    is_slow: bool


class Background:
    """Encodes captured items into the spool and delivers them. All methods are safe from any thread."""

    def __init__(
        self, settings: ClientSettings, project: str, counters: Counters, log: LogOnce, *, block_when_full: bool
    ) -> None:
        """Take over what earlier processes left in the spool, and start the threads."""
        self._settings = settings
        self._counters = counters
        self._log = log
        self._block_when_full = block_when_full
        self._closed = False
        self._disabled_by_fork = False
        self._address_of: Registration | None = None
        self._own: Registration | None = None
        self._own_has_begun = False
        self._feed_attached = False
        self._next_advice_poll = 0.0
        self._invalid: str | None = None
        self.want_weights_at_step: int | None = None
        """The step whose weights the service requests, None if none are."""
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        # Items and bytes that are being copied, wait, or are being encoded.
        self._held_items = self._held_bytes = 0
        self._room = threading.Condition()
        self._spool = Spool(settings, project, counters, log)
        self.sender = Sender(
            settings, self._spool, counters, log, status=self.status, after_delivery=self._after_delivery
        )
        self._encoder = threading.Thread(target=self._encode_all, name="foreshock-encoder", daemon=True)
        _open_backgrounds.add(self)
        self._spool.adopt()
        self._encoder.start()
        self.sender.start()

    def take(
        self, what: str, size: int, capture: Callable[[], Make], *, needed: bool = False, is_slow: bool = False
    ) -> bool:
        """Take an item of `size` bytes if there is room for it; without room, count it as dropped and return False.

        `capture` is called at once and returns the function that encodes the item in the background. A full queue
        costs no copy. `needed` items are small and others depend on them: they always fit.
        """
        if self._disabled_by_fork or self._closed:
            self._counters.add(dropped_closed=1, dropped_bytes=size)
            self._log.warning("closed", f"{what} is dropped: the client was closed, or its process forked")
            return False
        with self._room:
            if self._block_when_full:
                self._room.wait_for(lambda: needed or self._closed or self._fits(size))
            # A client that was closed meanwhile encodes nothing more.
            if self._closed or not (needed or self._fits(size)):
                self._counters.add(dropped_queue_full=1, dropped_bytes=size)
                self._log.warning(
                    "queue full",
                    f"{what} is dropped: the queue is full, encoding is slower than logging; see client.counters",
                )
                return False
            self._hold(1, size)
        try:
            make = capture()
        except BaseException:
            self._hold(-1, -size)
            raise
        self._counters.add(accepted=1)
        self._works.put(_Work(what, size, make, is_slow))
        return True

    def _fits(self, size: int) -> bool:
        """Return whether there is room; an item larger than the bound fits if it is alone, or it never would."""
        settings = self._settings
        is_within = self._held_items < settings.max_queue_items and self._held_bytes + size <= settings.max_queue_bytes
        return is_within or not self._held_items

    def _hold(self, items: int, size: int) -> None:
        with self._room:
            self._held_items += items
            self._held_bytes += size
            self._room.notify_all()

    def begin(self, registration: Registration, shard: int | None) -> None:
        """Set the attempt that this client logs. The first rank prints the run's address when it is registered."""
        self._own, self._own_has_begun = registration, False
        if not shard:
            self._address_of = registration
        self.sender.begin(registration, shard)

    def note_invalid(self, kind: str, sentence: str, count: int = 1) -> None:
        """Count items or rollouts that are not sent since they are invalid; log the first sentence of a kind."""
        self._counters.add(invalid=count)
        self._invalid = sentence
        self._log.warning(f"invalid {kind}", sentence)

    def note_left_out(self, count: int, sentence: str) -> None:
        """Count rollouts that were left out of their shard since they are invalid; log the first sentence."""
        self._counters.add(left_out=count)
        self.note_invalid("rows", sentence, count)

    def set_checkpoint_request(self, step: int | None) -> None:
        """Take the requested step from an AdviceFeed, and stop polling."""
        self._feed_attached = True
        self.want_weights_at_step = step

    def status(self) -> DeliveryStatus:
        """Return what the service does not have."""
        if self._disabled_by_fork:
            dropped = self._counters.dropped_closed
            return DeliveryStatus(dropped=dropped, reason="the client belongs to the parent process")
        now = self._counters.snapshot()
        undelivered = self._held_items + len(self._spool)
        reason = self.sender.reason if undelivered or now.rejected else None
        reason = reason or (self._invalid if now.invalid else None)
        return DeliveryStatus(undelivered, now.rejected, now.dropped, now.invalid, reason)

    def flush(self, timeout_seconds: float) -> DeliveryStatus:
        """Wait until everything is delivered, rejected or dropped, or until the timeout; return what is missing."""
        if not self._disabled_by_fork:
            self.sender.wait(self._idle, timeout_seconds)
        return self.status()

    def close(self, timeout_seconds: float | None = None) -> DeliveryStatus:
        """Deliver until the timeout (default: `exit_seconds`), leave the rest on disk, stop; print what is missing."""
        close_together([self], timeout_seconds)
        return self.status()

    @contextlib.contextmanager
    def _never_raises(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._counters.add(internal_errors=1)
            self._log.exception("close", "closing the client failed", error)

    def _is_encoded(self) -> bool:
        return not self._held_items

    def _idle(self) -> bool:
        return self._is_encoded() and not len(self._spool)

    def _is_settled(self) -> bool:
        """Return whether everything is encoded, and delivered or failed: the disk keeps the rest."""
        return self._is_encoded() and self.sender.next()[0] > 0.0

    def _encode_all(self) -> None:
        while (work := self._works.get()) is not None:
            if work.is_slow:
                # No thread can be started while the interpreter ends.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._encode, args=(work,), name="foreshock-digest", daemon=True).start()
                    continue
            self._encode(work)

    def _encode(self, work: _Work) -> None:
        try:
            self._spool.append(work.make())
        except (RolloutsError, WeightsError) as error:
            self.note_invalid(type(error).__name__, f"{work.what} is invalid and not sent: {error}")
        except Exception as error:
            self._counters.add(internal_errors=1, invalid=1)
            self._log.exception(f"encoding {type(error).__name__}", f"{work.what} could not be encoded", error)
        finally:
            self._hold(-1, -work.size)
        self.sender.wake()

    def _after_delivery(self, delivery: Delivery) -> None:
        """Print the run's address once; ask for wanted weights after rollouts. Called by the sender's thread."""
        wanted = self._address_of
        if wanted is not None and self.sender.run_id(wanted) is not None:
            self._address_of = None
            with contextlib.suppress(OSError, ValueError):
                address = run_url(self._settings.url, wanted.run["project"], wanted.run["key"])
                print(f"foreshock: {address}", file=sys.stderr, flush=True)
        if delivery.kind not in ("rollouts", "statistics"):
            return
        self._warn_of_a_start_at_0(delivery)
        if self._feed_attached or time.monotonic() < self._next_advice_poll:
            return
        self._next_advice_poll = time.monotonic() + _SECONDS_BETWEEN_ADVICE_POLLS
        with contextlib.suppress(ServiceError):
            run = self.sender.run_id(delivery.registration)
            answer = self.sender.connection.get_json(f"/v1/runs/{run}/lr-advice")
            step = answer.get("want_weights_at_step") if isinstance(answer, dict) else None
            self.want_weights_at_step = step if isinstance(step, int) else None

    def _warn_of_a_start_at_0(self, delivery: Delivery) -> None:
        """Warn if a restart did not pass `resume_step`: what earlier attempts logged is superseded then.

        The first delivered shard of this client's attempt decides, not an item that another process left.
        """
        registration, step = delivery.registration, int(delivery.place["step"])
        if self._own_has_begun or not registration.same_attempt(self._own):
            return
        self._own_has_begun = True
        attempt = self.sender.attempt_number(registration)
        if (attempt or 0) > 1 and step > 1 and not registration.attempt.get("resume_step"):
            self._log.warning(
                "start at 0",
                f"attempt {attempt} of the run began at step 0, which supersedes all steps of earlier attempts, and "
                f"its first step is {step}; if the trainer resumed there, pass resume_step={step} to start_run",
            )

    def _print(self, status: DeliveryStatus) -> None:
        lines = [f"foreshock: {status}"]
        kept = min(self._spool.on_disk, status.undelivered)
        if kept:
            lines.append(f"  {kept} undelivered items are kept in {self._spool.directory}; the next client sends them")
        if status.undelivered > kept:
            lines.append(
                f"  {status.undelivered - kept} could not be written to {self._spool.directory} and end with this "
                "process; set FORESHOCK_SPOOL_DIRECTORY to a folder that can be written and has room"
            )
        if status.rejected:
            lines.append(f"  the rejected items are {self._spool.directory}/*.rejected; the log has the reasons")
        with contextlib.suppress(OSError, ValueError):
            # stderr is closed at the end of some processes.
            print("\n".join(lines), file=sys.stderr)

    def _disable_after_fork(self) -> None:
        self._disabled_by_fork = True
        self._counters.replace_lock()
        self._spool.close(in_forked_child=True)


_open_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()
# Address of a service → seconds that closing clients of this process waited while it took nothing.
_waited_in_vain: dict[str, float] = {}
# Seconds of a timeout that are kept for writing the rest to disk.
_MOST_END_SECONDS, _LEAST_END_SECONDS = 2.0, 0.5


def close_together(backgrounds: Sequence[Background], timeout_seconds: float | None = None) -> None:
    """Close backgrounds within one timeout, the longest `exit_seconds` by default, which includes writing to disk.

    While the service takes nothing, clients that are closed one after the other share the default timeout, too.
    """
    closing = [each for each in backgrounds if not (each._closed or each._disabled_by_fork)]
    if not closing:
        return
    begin = time.monotonic()
    seconds = timeout_seconds
    if seconds is None:
        longest = max(each._settings.exit_seconds for each in closing)
        seconds = longest - min(_waited_in_vain.get(each._settings.url, 0.0) for each in closing)
    end = begin + max(seconds, 0.0)
    for each in closing:
        each._closed = True
        each._hold(0, 0)
    for each in closing:
        delivered, url = each._counters.delivered, each._settings.url
        with each._never_raises():
            left = end - min(_MOST_END_SECONDS, max(seconds, 0.0) / 2) - time.monotonic()
            each.sender.wait(each._is_settled, left)
        in_vain = not each._idle() and each._counters.delivered == delivered
        _waited_in_vain[url] = _waited_in_vain.get(url, 0.0) + time.monotonic() - begin if in_vain else 0.0
    # Beyond the deadline if necessary: items that are only in memory would be lost. Each phase is begun for all before
    # one is waited for: an answer without an end keeps a thread at work.
    now = time.monotonic()
    end = max(end, now + _LEAST_END_SECONDS)
    for each in closing:
        with each._never_raises(), each._room:
            each._room.wait_for(each._is_encoded, (now + end) / 2 - time.monotonic())
        each._works.put(None)
        each.sender.stop()
    for each in closing:
        each.sender.join((now + 3 * end) / 4)
        each.sender.connection.interrupt()
    for each in closing:
        with each._never_raises():
            each.sender.join(end)
            each.sender.connection.close()
            each._spool.close()
        _open_backgrounds.discard(each)
        status = each.status()
        if not status.complete:
            each._print(status)


@atexit.register
def _close_all() -> None:
    close_together(list(_open_backgrounds))


def _disable_all_after_fork() -> None:
    for background in list(_open_backgrounds):
        background._disable_after_fork()


os.register_at_fork(after_in_child=_disable_all_after_fork)
