"""Send the scalars of a step while its rollouts are still being sent, over a connection of its own.

The service decodes and measures the rollouts meanwhile. Scalars that are stored before their step closes are seen by
the detectors when it closes; later ones make the service replay the detectors for the step a second time. Only scalars
of the same step are sent ahead, so a step is complete before anything of the next one is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx

from foreshock.client.deliveries import Delivery
from foreshock.client.outbox import Outbox, OutboxEntry
from foreshock.client.sender import DeliverySender

__all__ = ["ScalarsAhead"]


class ScalarsAhead:
    """A thread that sends what follows an entry of the outbox, between `begin` and `end`.

    What it fails to deliver stays in the outbox: the thread that calls `begin` sends it again in its turn, and handles
    the error. Scalars may be sent twice, since storing them is idempotent.
    """

    def __init__(
        self,
        sender: DeliverySender,
        outbox: Outbox,
        delivered: Callable[[OutboxEntry, httpx.Response | None], None],
    ) -> None:
        self._sender = sender
        self._outbox = outbox
        self._delivered = delivered
        self._changed = threading.Condition()
        self._rollouts: Delivery | None = None
        self._entry: OutboxEntry | None = None
        self._sending = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="foreshock-scalars", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def begin(self, entry: OutboxEntry, rollouts: Delivery) -> None:
        """Start to send the scalars that follow `rollouts`, the delivery of an entry of the outbox."""
        if not self._sender.is_registered(rollouts):
            return
        with self._changed:
            self._entry, self._rollouts = entry, rollouts
            self._changed.notify_all()

    def look_again(self) -> None:
        """Look whether an entry that was added to the outbox can be sent ahead."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Begin no further request, and wait for the one that has begun."""
        with self._changed:
            self._rollouts = None
            self._changed.wait_for(lambda: not self._sending)

    def interrupt(self) -> None:
        """End the thread, and make its request fail at once. Safe from any thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._sender.interrupt()

    def _run(self) -> None:
        while (found := self._wait_for_next()) is not None:
            sent = self._send(*found)
            with self._changed:
                self._sending = False
                if not sent:
                    self._rollouts = None
                self._changed.notify_all()

    def _wait_for_next(self) -> tuple[OutboxEntry, Delivery] | None:
        """Wait for an entry to send ahead; None when stopping."""
        with self._changed:
            while not self._stopping:
                found = self._next()
                if found is not None:
                    self._sending = True
                    return found
                self._changed.wait()
            return None

    def _next(self) -> tuple[OutboxEntry, Delivery] | None:
        """Return the entry that follows the rollouts if it has scalars of their step."""
        entry = self._outbox.after(self._entry) if self._rollouts is not None and self._entry is not None else None
        # Entries on disk are sent in their turn: they wait for a service that was away.
        delivery = entry.delivery if entry is not None else None
        if entry is None or delivery is None or self._rollouts is None or not _is_of_step(delivery, self._rollouts):
            return None
        return entry, delivery

    def _send(self, entry: OutboxEntry, delivery: Delivery) -> bool:
        try:
            response = self._sender.send(delivery)
        except Exception:
            # The sender thread meets the error in its turn, and handles it.
            return False
        self._delivered(entry, response)
        return True


def _is_of_step(scalars: Delivery, rollouts: Delivery) -> bool:
    return (
        scalars.kind == "scalars"
        and scalars.registration == rollouts.registration
        and scalars.path.removesuffix("/scalars") == rollouts.path.rpartition("/rollouts/")[0]
    )
