"""Typed events: a part of the service notifies higher parts without importing them.

`app.py` subscribes the handlers. A handler runs inside the transaction of the publisher, in the order of subscription;
what it writes is committed with the publisher's work, and an error rolls both back. Work that takes long is done by a
handler of the second kind, which runs after the commit in the publisher's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.orm import Session

EventType = TypeVar("EventType")
ContextType = TypeVar("ContextType")


class EventBus:
    """The subscriptions of one application."""

    def __init__(self) -> None:
        self._handlers: defaultdict[type, list[Callable[[Session, Any], object]]] = defaultdict(list)
        self._after_commit: defaultdict[type, list[Callable[[Any, Any], object]]] = defaultdict(list)

    def subscribe(self, event_type: type[EventType], handler: Callable[[Session, EventType], object]) -> None:
        """Call `handler(session, event)` for each published event of exactly this type."""
        self._handlers[event_type].append(handler)

    def publish(self, session: Session, event: object) -> None:
        """Call the handlers of this event's type, one after the other; raises what a handler raises."""
        for handler in self._handlers.get(type(event), ()):
            handler(session, event)

    def subscribe_after_commit(
        self, event_type: type[EventType], handler: Callable[[ContextType, EventType], object]
    ) -> None:
        """Call `handler(context, event)` for each event of exactly this type whose transaction has committed."""
        self._after_commit[event_type].append(handler)

    def publish_after_commit(self, context: object, event: object) -> None:
        """Call the after-commit handlers of this event's type. Call it outside a transaction, after `Database.write`.

        A crash may come between the commit and this call: a handler may only do early what a periodic task also does.
        """
        for handler in self._after_commit.get(type(event), ()):
            handler(context, event)
