"""API keys and their scopes: make, find, list and revoke them. Only the hash of a key is stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.dialect import insert_if_absent
from foreshock_service.platform.database.tables import ApiKey
from foreshock_service.platform.identifiers import new_identifier
from foreshock_service.platform.keys import repository

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
    """Return the SHA-256 that is stored of a key; its 256 random bits make a slow hash unnecessary."""
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
    """Store the hash of `secret` with its project and scopes; an equal secret keeps the row it has."""
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
    key = repository.find_by_hash(session, hash_secret(secret))
    assert key is not None
    return key


def find_key(session: Session, key_id: str) -> ApiKey | None:
    """Return the key with this id, revoked or not."""
    return repository.find(session, key_id)


def find_key_by_secret(session: Session, secret: str) -> ApiKey | None:
    """Return the key with this secret, revoked or not; also by a secret that a rotation still keeps valid.

    Hashes are compared in constant time.
    """
    secret_hash = hash_secret(secret)
    key = repository.find_by_hash(session, secret_hash)
    if key is not None:
        return key if hmac.compare_digest(key.secret_hash, secret_hash) else None
    retired = repository.find_retired(session, secret_hash)
    if retired is None or not hmac.compare_digest(retired.secret_hash, secret_hash):
        return None
    return repository.find(session, retired.key_id) if now_us() < retired.valid_until_us else None


def was_ever_a_secret(session: Session, secret: str) -> bool:
    """Return whether a key has or had this secret, valid or not."""
    secret_hash = hash_secret(secret)
    found = repository.find_by_hash(session, secret_hash) or repository.find_retired(session, secret_hash)
    return found is not None


def is_valid(key: ApiKey) -> bool:
    """Return whether the key is neither revoked nor expired."""
    return key.revoked_at_us is None and (key.expires_at_us is None or now_us() < key.expires_at_us)


def describe(key: ApiKey) -> dict[str, Any]:
    """Return what the audit says of a key: its name, project, scopes and expiry."""
    return {"name": key.name, "project": key.project, "scopes": list(key.scopes), "expires_at_us": key.expires_at_us}


def keys_exist(session: Session) -> bool:
    """Return whether a key was ever made, revoked ones included: then requests without a key are refused."""
    return repository.any_exists(session)


def list_keys(session: Session) -> Sequence[ApiKey]:
    """Return every key, revoked ones included, oldest first."""
    return repository.all_keys(session)


def rotate_key(session: Session, key_id: str, secret: str, overlap_seconds: float) -> ApiKey | None:
    """Give a key another secret; None if there is no such key.

    The replaced secret stays valid for `overlap_seconds`, page sessions made before end at once.
    """
    key = repository.find(session, key_id)
    if key is None:
        return None
    if not is_valid(key):
        raise ConfigurationError(f"{key_id} is revoked or expired: make another key with `foreshock keys create`")
    now = now_us()
    repository.retire(session, key, now + int(overlap_seconds * 1e6))
    key.secret_hash = hash_secret(secret)
    key.sessions_from_us = now
    return key


def revoke_key(session: Session, key_id: str) -> ApiKey | None:
    """Revoke a key for good, with every secret it had; None if there is no such key."""
    key = repository.find(session, key_id)
    if key is not None:
        key.revoked_at_us = key.revoked_at_us or now_us()
    return key


def end_session(session: Session, session_hash: str, lifetime_seconds: float) -> None:
    """End a page session for good; the note of it is kept for the lifetime of a session."""
    repository.end_session(session, session_hash, now_us() + int(lifetime_seconds * 1e6))


def has_session_ended(session: Session, session_hash: str) -> bool:
    """Return whether a page session was ended by logging out."""
    return repository.has_ended(session, session_hash)
