"""API keys and their scopes: make, find, list and revoke them. Only the hash of a key is stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence
from enum import StrEnum

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from service.platform.database.dialect import insert_if_absent
from service.platform.database.tables import ApiKey
from service.platform.identifiers import new_identifier
from service.platform.keys import repository

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


def create_key(session: Session, secret: str, name: str, project: str | None, scopes: Collection[Scope]) -> ApiKey:
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
    }
    insert_if_absent(session, ApiKey, row)
    key = repository.find_by_hash(session, hash_secret(secret))
    assert key is not None
    return key


def find_key(session: Session, key_id: str) -> ApiKey | None:
    """Return the key with this id, revoked or not."""
    return repository.find(session, key_id)


def find_key_by_secret(session: Session, secret: str) -> ApiKey | None:
    """Return the key with this secret, revoked or not. Hashes are compared in constant time."""
    secret_hash = hash_secret(secret)
    key = repository.find_by_hash(session, secret_hash)
    return key if key is not None and hmac.compare_digest(key.secret_hash, secret_hash) else None


def keys_exist(session: Session) -> bool:
    """Return whether a key was ever made, revoked ones included: then requests without a key are refused."""
    return repository.any_exists(session)


def list_keys(session: Session) -> Sequence[ApiKey]:
    """Return every key, revoked ones included, oldest first."""
    return repository.all_keys(session)


def revoke_key(session: Session, key_id: str) -> bool:
    """Revoke a key for good; False if there is no such key."""
    key = repository.find(session, key_id)
    if key is None:
        return False
    key.revoked_at_us = key.revoked_at_us or now_us()
    return True
