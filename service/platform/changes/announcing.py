"""Announce a changed run: to this process after the commit, to the others by PostgreSQL's NOTIFY.

Receivers are functions of a run's id, or None for "any run may have changed"; they are called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.hooks import after_commit

CHANNEL = "foreshock_changes"

Receiver = Callable[[str | None], None]
_NOTIFY = select(func.pg_notify(CHANNEL, bindparam("run_id")))
_lock = threading.Lock()
_receivers: list[Receiver] = []


def wake_after_commit(session: Session, run_id: str) -> None:
    """Wake the long polls that wait for this run, in every process, once the session's transaction is committed."""
    if session.get_bind().dialect.name == "postgresql":
        # Sent by the commit, and once for a run that a transaction announces several times.
        session.execute(_NOTIFY, {"run_id": run_id})
    after_commit(session, lambda: announce(run_id))


def announce(run_id: str | None) -> None:
    """Tell the receivers of this process that a run, or None: any run, may have changed."""
    with _lock:
        receivers = list(_receivers)
    for receive in receivers:
        receive(run_id)


def add_receiver(receive: Receiver) -> None:
    """Call `receive` at each change from now on."""
    with _lock:
        _receivers.append(receive)


def remove_receiver(receive: Receiver) -> None:
    """Stop calling it."""
    with _lock:
        _receivers.remove(receive)
