"""Callbacks after a commit, such as waking a long poll; dropped if the transaction rolls back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from foreshock_service.platform.database.session import Database

_KEY = "foreshock.after_commit"
_IN_CALLER = "foreshock.in_caller"
_logger = logging.getLogger(__name__)


def after_commit(session: Session, callback: Callable[[], None]) -> None:
    """Call `callback` after the session's transaction is committed. It must be quick and must not raise."""
    session.info.setdefault(_KEY, []).append(callback)


def run_after_commit(session: Session) -> None:
    """Run the registered callbacks; an error of one is logged, because the data is already committed."""
    for callback in session.info.pop(_KEY, []):
        try:
            callback()
        except Exception:
            _logger.exception("an after-commit callback failed")


def in_caller_after_commit(session: Session, name: str, work: Callable[[Database], object]) -> None:
    """Call `work(database)` before `Database.write` returns, in its caller's thread and outside the transaction.

    Of several with one name the first is called. A crash may come before it: it may only do early what a periodic task
    also does.
    """
    session.info.setdefault(_IN_CALLER, {}).setdefault(name, work)


def run_in_caller(session: Session, database: Database) -> None:
    """Run the work that is registered; an error is logged, because the data is already committed."""
    for work in session.info.pop(_IN_CALLER, {}).values():
        try:
            work(database)
        except Exception:
            _logger.exception("work after a commit failed; a periodic task repeats it")
