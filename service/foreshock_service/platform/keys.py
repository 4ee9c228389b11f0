"""Uses and limits of API keys in this process."""

import math
import threading
import time
from collections.abc import Callable

from sqlalchemy import delete, or_, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey, EndedSession
from foreshock_service.platform.problem import ProblemError

BURST_SECONDS = 5.0
"""A key may save up this many seconds of its rate: a thousand trainers whose polls end together poll again together."""
_LEAST_APART_US = 60_000_000


class TooManyRequests(ProblemError, status=429, problem_type="too-many-requests"):
    """A key beyond its limit of requests or uploads; the same request succeeds after Retry-After."""


class KeyUses:
    """Uses of keys in this process. Thread-safe: single operations on a dict are atomic."""

    def __init__(self) -> None:
        self._noted: dict[str, int] = {}
        self._written: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        self._noted[key_id] = now_us()

    def write(self, database: Database) -> None:
        """Write the last use of each key, at most once a minute per key, and delete expired sessions."""
        due = {
            key_id: used
            for key_id, used in list(self._noted.items())
            if used - self._written.get(key_id, -_LEAST_APART_US) >= _LEAST_APART_US
        }
        if not due:
            return

        def write(session: Session) -> None:
            for key_id, used in due.items():
                # Another process may have written a newer use.
                before = or_(ApiKey.last_used_at_us.is_(None), ApiKey.last_used_at_us <= used - _LEAST_APART_US)
                session.execute(update(ApiKey).where(ApiKey.id == key_id, before).values(last_used_at_us=used))
            session.execute(delete(EndedSession).where(EndedSession.expires_at_us < now_us()))

        database.write(write)
        self._written |= due


class KeyLimits:
    """The limit of each key's requests. A rate of 0 means no limit. Thread-safe."""

    def __init__(self, requests_per_second: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = requests_per_second
        self._clock = clock
        self._lock = threading.Lock()
        # Key → the time at which it has no request to make up for: each request moves it by 1/rate.
        self._even: dict[str, float] = {}

    def admit(self, key_id: str) -> None:
        """Count a request of the key; raises TooManyRequests with the seconds until the next one is admitted."""
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            even = max(self._even.get(key_id, now), now) + 1 / self._rate
            # At least one request: otherwise a rate below one per five seconds would admit none.
            wait = even - now - max(BURST_SECONDS, 1 / self._rate)
            if wait <= 1e-9:
                self._even[key_id] = even
                return
        seconds = max(1, math.ceil(wait - 1e-9))
        raise TooManyRequests(
            f"this key is limited to {self._rate:,.10g} requests per second: try again in {seconds} s "
            "(FORESHOCK_KEY_REQUESTS_PER_SECOND of the service)",
            headers={"Retry-After": str(seconds)},
        )
