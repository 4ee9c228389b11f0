"""Typed events: a part of the service notifies higher parts without importing them.

`app.py` subscribes the handlers. A handler runs inside the transaction of the publisher, in the order of subscription;
what it writes is committed with the publisher's work, and an error rolls both back. Work that takes long is done by a
handler of the second kind, which runs after the commit (`after_commit` in `platform/database/session.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from foreshock_service.platform.database.session import after_commit

EventType = TypeVar("EventType")


class EventBus:
    """The subscriptions of one application."""

    def __init__(self) -> None:
        self._handlers: defaultdict[type, list[Callable[[Session, Any], object]]] = defaultdict(list)
        self._after_commit: defaultdict[type, list[Callable[[Any], object]]] = defaultdict(list)

    def subscribe(self, event_type: type[EventType], handler: Callable[[Session, EventType], object]) -> None:
        """Call `handler(session, event)` for each published event of exactly this type."""
        self._handlers[event_type].append(handler)

    def publish(self, session: Session, event: object) -> None:
        """Call the handlers of this event's type, one after the other; raises what a handler raises."""
        for handler in self._handlers.get(type(event), ()):
            handler(session, event)
        for later in self._after_commit.get(type(event), ()):
            after_commit(session, partial(later, event))

    def subscribe_after_commit(self, event_type: type[EventType], handler: Callable[[EventType], object]) -> None:
        """Call `handler(event)` for each event of exactly this type, once its transaction has committed."""
        self._after_commit[event_type].append(handler)
