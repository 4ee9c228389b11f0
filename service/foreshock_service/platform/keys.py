"""API keys: their secrets, scopes, limits and last use. Only the hash of a secret is stored."""

import hashlib
import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey, EndedSession, RetiredSecret, new_identifier
from foreshock_service.platform.problem import ProblemError

KEY_PREFIX = "fsk_"


class Scope(StrEnum):
    """Permission of a key; `admin` includes the others."""

    INGEST = "ingest"
    READ = "read"
    WORKER = "worker"
    ADMIN = "admin"


def new_secret() -> str:
    """Return a new API key: the prefix that secret scanners look for, then 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_secret(secret: str) -> str:
    """Return the SHA-256 that is stored for a secret; its 256 random bits make a slow hash unnecessary."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(
    session: Session,
    secret: str,
    name: str,
    project: str | None,
    scopes: Collection[Scope],
    *,
    expires_at_us: int | None = None,
) -> ApiKey:
    """Store the hash of `secret` with its project and scopes. If the secret is stored already, return that row."""
    if not scopes:
        raise ConfigurationError("a key needs at least one scope: ingest, read, worker or admin")
    row = {
        "id": new_identifier("key"),
        "name": name,
        "project": project,
        "scopes": sorted(scope.value for scope in scopes),
        "secret_hash": hash_secret(secret),
        "created_at_us": now_us(),
        "revoked_at_us": None,
        "expires_at_us": expires_at_us,
        "last_used_at_us": None,
        "sessions_from_us": 0,
    }
    insert_if_absent(session, ApiKey, row)
    key = _find_by_hash(session, hash_secret(secret))
    assert key is not None
    return key


def find_key_by_secret(session: Session, secret: str) -> ApiKey | None:
    """Return the key with this secret, revoked or not. A secret that was rotated away counts while it is still valid.

    Hashes are compared in constant time.
    """
    secret_hash = hash_secret(secret)
    key = _find_by_hash(session, secret_hash)
    if key is not None:
        return key if hmac.compare_digest(key.secret_hash, secret_hash) else None
    retired = session.get(RetiredSecret, secret_hash)
    if retired is None or not hmac.compare_digest(retired.secret_hash, secret_hash):
        return None
    return session.get(ApiKey, retired.key_id) if now_us() < retired.valid_until_us else None


def was_ever_a_secret(session: Session, secret: str) -> bool:
    """Return whether a key has or had this secret, valid or not."""
    secret_hash = hash_secret(secret)
    found = _find_by_hash(session, secret_hash) or session.get(RetiredSecret, secret_hash)
    return found is not None


def is_valid(key: ApiKey) -> bool:
    """Return whether the key is neither revoked nor expired."""
    return key.revoked_at_us is None and (key.expires_at_us is None or now_us() < key.expires_at_us)


def describe(key: ApiKey) -> dict[str, Any]:
    """Return what the audit records of a key: its name, project, scopes and expiry."""
    return {"name": key.name, "project": key.project, "scopes": list(key.scopes), "expires_at_us": key.expires_at_us}


def keys_exist(session: Session) -> bool:
    """Return whether a key was ever made, even a revoked one. If so, requests without a key are refused."""
    return session.scalar(select(ApiKey.id).limit(1)) is not None


def list_keys(session: Session) -> Sequence[ApiKey]:
    """Return every key, revoked ones included, oldest first."""
    return session.scalars(select(ApiKey).order_by(ApiKey.created_at_us, ApiKey.id)).all()


def rotate_key(session: Session, key_id: str, secret: str, overlap_seconds: float) -> ApiKey | None:
    """Give a key a new secret; return None if there is no such key.

    The old secret stays valid for `overlap_seconds`. Existing page sessions end at once.
    """
    key = session.get(ApiKey, key_id)
    if key is None:
        return None
    if not is_valid(key):
        raise ConfigurationError(f"{key_id} is revoked or expired: make another key with `foreshock keys create`")
    now = now_us()
    valid_until = now + int(overlap_seconds * 1e6)
    # Earlier secrets must not stay valid for longer than the one replaced now.
    earlier = update(RetiredSecret).where(RetiredSecret.key_id == key_id, RetiredSecret.valid_until_us > valid_until)
    session.execute(earlier.values(valid_until_us=valid_until))
    retired = {"secret_hash": key.secret_hash, "key_id": key_id, "valid_until_us": valid_until}
    insert_if_absent(session, RetiredSecret, retired)
    key.secret_hash = hash_secret(secret)
    key.sessions_from_us = now
    return key


def revoke_key(session: Session, key_id: str) -> ApiKey | None:
    """Revoke a key for good, with every secret it had; None if there is no such key."""
    key = session.get(ApiKey, key_id)
    if key is not None:
        key.revoked_at_us = key.revoked_at_us or now_us()
    return key


def end_session(session: Session, session_hash: str, lifetime_seconds: float) -> None:
    """End a page session for good; the row is kept for the lifetime of a session."""
    row = {"session_hash": session_hash, "expires_at_us": now_us() + int(lifetime_seconds * 1e6)}
    insert_if_absent(session, EndedSession, row)


def _find_by_hash(session: Session, secret_hash: str) -> ApiKey | None:
    """Return the key whose secret has this hash."""
    return session.scalar(select(ApiKey).where(ApiKey.secret_hash == secret_hash))


_LEAST_APART_US = 60_000_000


class KeyUses:
    """Uses of keys in this process. Thread-safe: single operations on a dict are atomic."""

    def __init__(self) -> None:
        self._noted: dict[str, int] = {}
        self._written: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        """Note that the key was used now."""
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


# A key may save up this many seconds of its rate: a thousand trainers whose polls end together poll again together.
BURST_SECONDS = 5.0


class TooManyRequests(ProblemError, status=429, problem_type="too-many-requests"):
    """A key beyond its limit of requests or uploads; the same request succeeds after Retry-After."""


class KeyLimits:
    """The limit of each key's requests, as buckets that refill at a rate. A rate of 0 means no limit. Thread-safe."""

    def __init__(self, requests_per_second: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = requests_per_second
        # At least one request: otherwise a rate below one per five seconds would admit none.
        self._most = max(1.0, requests_per_second * BURST_SECONDS)
        self._clock = clock
        self._lock = threading.Lock()
        # Key → the requests that are left of its bucket, and when that was so.
        self._keys: dict[str, tuple[float, float]] = {}

    def admit(self, key_id: str) -> None:
        """Count a request of the key; raises TooManyRequests with the seconds until the next one is admitted."""
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            left, at = self._keys.get(key_id, (self._most, now))
            left = min(self._most, left + (now - at) * self._rate)
            if left < 1.0:
                self._keys[key_id] = left, now
                seconds = max(1, math.ceil((1.0 - left) / self._rate))
                raise TooManyRequests(
                    f"this key is limited to {self._rate:,.10g} requests per second: try again in {seconds} s "
                    "(FORESHOCK_KEY_REQUESTS_PER_SECOND of the service)",
                    headers={"Retry-After": str(seconds)},
                )
            self._keys[key_id] = left - 1.0, now
