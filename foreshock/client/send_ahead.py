"""Send rollouts and scalars while earlier ones are still being sent, over connections of their own.

The service decodes the rollouts of a step while it stores those of the step before. Scalars that are stored before
their step closes are seen by the detectors when it closes; later ones make the service replay the detectors for the
step a second time.

The service stores the steps that it receives together in their order. What is sent ahead stays in the outbox until the
service has it: the sender's thread sends it again in its turn if it failed. Both kinds may be sent twice, since storing
them is idempotent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import httpx

from foreshock.client.outbox import Outbox, OutboxEntry
from foreshock.client.sender import DeliverySender

__all__ = ["SendAhead"]


class SendAhead:
    """Threads, one for each sender, that send what follows the entry that the sender's thread sends."""

    def __init__(
        self,
        senders: Sequence[DeliverySender],
        outbox: Outbox,
        *,
        delivered: Callable[[OutboxEntry, httpx.Response | None], None],
        ended: Callable[[], None],
        allowed: Callable[[], bool],
    ) -> None:
        """Prepare the threads. `delivered` gets each answer; `ended` is called after each try, `allowed` before it."""
        self._senders = senders
        self._outbox = outbox
        self._delivered = delivered
        self._ended = ended
        self._allowed = allowed
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(sender,), name="foreshock-send-ahead", daemon=True)
            for sender in senders
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def look(self) -> None:
        """Look for an entry that can be sent ahead: one was added, or the sending of one has begun or ended."""
        with self._changed:
            self._changed.notify_all()

    def interrupt(self) -> None:
        """End the threads, and make their requests fail at once. Safe from any thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for sender in self._senders:
            sender.interrupt()

    def _run(self, sender: DeliverySender) -> None:
        while (entry := self._wait_for_next(sender)) is not None:
            try:
                self._send(sender, entry)
            finally:
                self._outbox.release(entry)
            self._ended()
            self.look()

    def _wait_for_next(self, sender: DeliverySender) -> OutboxEntry | None:
        """Wait for an entry to send ahead, and take it; None when stopping."""
        with self._changed:
            while not self._stopping:
                entry = self._outbox.take_ahead(sender.is_registered) if self._allowed() else None
                if entry is not None:
                    return entry
                self._changed.wait()
            return None

    def _send(self, sender: DeliverySender, entry: OutboxEntry) -> None:
        delivery = entry.delivery
        if delivery is None:
            # Written to disk meanwhile: it is sent in its turn.
            return
        try:
            response = sender.send(delivery)
        except Exception:
            # The sender's thread meets the error in the entry's turn, and handles it.
            entry.in_turn = True
        else:
            self._delivered(entry, response)
