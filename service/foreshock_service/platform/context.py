"""The long-lived parts of one service process, and the typed events by which its parts notify each other.

`app.py` subscribes the handlers. Handlers run inside the publisher's transaction, in the order of subscription. Their
writes are committed with the publisher's work, and an error rolls both back. A handler defers long work until after the
commit with `after_commit` (`database/session.py`).
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from anyio import CapacityLimiter
from fastapi import Depends, Request
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.rollouts import RolloutBatch
from foreshock_service.platform import keys
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import TokenStore
from foreshock_service.platform.uploads import UploadPlaces

EventType = TypeVar("EventType")


class EventBus:
    """The subscriptions of one application."""

    def __init__(self) -> None:
        self._handlers: defaultdict[type, list[Callable[[Session, Any], object]]] = defaultdict(list)

    def subscribe(self, event_type: type[EventType], handler: Callable[[Session, EventType], object]) -> None:
        """Call `handler(session, event)` for each published event of exactly this type."""
        self._handlers[event_type].append(handler)

    def publish(self, session: Session, event: object) -> None:
        for handler in self._handlers.get(type(event), ()):
            handler(session, event)


# (run, attempt, step) and rollouts of it → the replayed scores: scorer → log-probs, [T] as the batch's response tokens.
ScoreReader = Callable[[Session, TokenStore, tuple[str, int, int], RolloutBatch], Mapping[str, NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The long-lived parts of one service process."""

    settings: Settings
    database: Database
    store: TokenStore
    decoders: DecoderPool
    session_secret: bytes
    uploads: UploadPlaces
    key_limits: keys.KeyLimits = field(default_factory=keys.KeyLimits)
    key_uses: keys.KeyUses = field(default_factory=keys.KeyUses)
    # Threads of readiness checks. A check that hangs keeps its thread; if all are taken, further checks fail.
    check_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(12))
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the service is asked to stop, before it waits for requests in flight. Waits and long jobs end then."""
    events: EventBus = field(default_factory=EventBus)
    replayed_scores: ScoreReader = lambda *_: {}
    unreadable_runs: dict[str, tuple[str, Exception]] = field(default_factory=dict)
    """Runs whose stored state a request could not read, with what it tried; `runs/failing_runs.py` alerts of them."""


async def context_of(request: Request) -> ServiceContext:
    # A coroutine, because FastAPI runs plain functions in a thread.
    return cast(ServiceContext, request.app.state.context)


Context = Annotated[ServiceContext, Depends(context_of)]
