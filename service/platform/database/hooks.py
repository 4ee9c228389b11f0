"""Callbacks after a commit, such as waking a long poll; dropped if the transaction rolls back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy.orm import Session

_KEY = "foreshock.after_commit"
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
