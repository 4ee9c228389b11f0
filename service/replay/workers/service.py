"""Workers: record that one was seen, and list those that are live.

Times are the database's, in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables.probes import Worker
from foreshock_service.replay.workers import repository

# A worker is live if it asked for a job or sent a heartbeat within this time. A lease request waits 60 s at most.
LIVE_MINUTES = 5


def record_worker(session: Session, worker: Worker) -> None:
    """Add the worker, or update when it was last seen and what it offers."""
    repository.record(session, worker)


def touch_worker(session: Session, project: str, name: str, now_us: int) -> None:
    """Record that the worker was just seen."""
    repository.set_last_seen(session, project, name, now_us)


def offers_of(worker: Worker) -> frozenset[str]:
    """Return the names of the scorers and the keys of the exact pairs that the worker offers."""
    return frozenset([*worker.scorers, *worker.exact_pairs])


def newest_workers(session: Session, project: str | None, limit: int) -> Sequence[Worker]:
    """Return up to `limit` workers that may work for the project, the one seen last first; None: of all projects."""
    return repository.newest(session, project, limit)


def live_workers(session: Session, project: str | None, now_us: int) -> Sequence[Worker]:
    """Return the live workers that may work for the project; None: of all projects."""
    return repository.seen_since(session, project, _live_since(now_us))


def count_live_workers(session: Session, project: str | None, now_us: int) -> Mapping[str, int]:
    """Return the number of live workers by accelerator."""
    return repository.count_seen_since(session, project, _live_since(now_us))


def _live_since(now_us: int) -> int:
    return now_us - LIVE_MINUTES * 60_000_000
