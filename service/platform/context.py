"""The long-lived parts of one service process, made once by `create_app` and handed to each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

import numpy as np
from anyio import CapacityLimiter
from fastapi import Depends, Request
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.events import EventBus
from foreshock_service.platform.ingest_rate import IngestRate
from foreshock_service.platform.keys import KeyLimits, KeyUses
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.stopping import Stopping
from foreshock_service.platform.store.tokens import TokenStore
from foreshock_service.platform.uploads import UploadPlaces


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """A shard of rollouts whose scores are requested: its key and its rollouts."""

    run_id: str
    attempt: int
    step: int
    batch: RolloutBatch


# Scores of a shard from probes: scorer → log-probs, [T] as the batch's response tokens, NaN if not scored.
ScoreReader = Callable[[Session, TokenStore, ScoredShard], Mapping[str, NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The long-lived parts of one service process."""

    settings: Settings
    database: Database
    store: TokenStore
    decoders: DecoderPool
    session_secret: bytes
    uploads: UploadPlaces
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    key_uses: KeyUses = field(default_factory=KeyUses)
    # Checks that hang keep their thread; beyond these, later checks fail without one.
    check_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(12))
    stopping: Stopping = field(default_factory=Stopping)
    ingest_rate: IngestRate = field(default_factory=IngestRate)
    events: EventBus = field(default_factory=EventBus)
    score_readers: tuple[ScoreReader, ...] = ()

    def replacing(self, **parts: Any) -> ServiceContext:
        """Return a copy of the context with some of its parts replaced."""
        return replace(self, **parts)


async def context_of(request: Request) -> ServiceContext:
    """Return the context of the application that serves this request."""
    # A coroutine, since FastAPI runs plain functions in a thread.
    return cast(ServiceContext, request.app.state.context)


Context = Annotated[ServiceContext, Depends(context_of)]
