"""Last use of each key: noted in memory by requests, written by the sweeper, at most once a minute for each key."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys import repository

_LEAST_APART_US = 60_000_000


class KeyUses:
    """The uses of one process. Thread-safe: single operations on a dict are atomic."""

    def __init__(self) -> None:
        self._noted: dict[str, int] = {}
        self._written: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        """Note that the key was used now."""
        self._noted[key_id] = now_us()

    def write(self, database: Database) -> None:
        """Write the noted uses that are a minute after the last ones written, and forget expired sessions."""
        due = {
            key_id: used
            for key_id, used in list(self._noted.items())
            if used - self._written.get(key_id, -_LEAST_APART_US) >= _LEAST_APART_US
        }
        if not due:
            return

        def write(session: Session) -> None:
            for key_id, used in due.items():
                repository.note_use(session, key_id, used, _LEAST_APART_US)
            repository.forget_expired_sessions(session, now_us())

        database.write(write)
        self._written |= due
