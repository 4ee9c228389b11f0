"""Make, list and revoke API keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from service.platform.database.dialect import insert_if_absent
from service.platform.database.tables import ApiKey
from service.platform.identifiers import new_identifier
from service.platform.keys import repository
from service.platform.security import Scope, hash_secret


def create_key(session: Session, secret: str, name: str, project: str | None, scopes: Collection[Scope]) -> ApiKey:
    """Store the hash of `secret` with what it is good for; an equal secret keeps the row it has."""
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


def list_keys(session: Session) -> Sequence[ApiKey]:
    """Every key, revoked ones included, oldest first."""
    return repository.all_keys(session)


def revoke_key(session: Session, key_id: str) -> bool:
    """Revoke a key for good; False where there is no such key."""
    key = repository.find(session, key_id)
    if key is None:
        return False
    key.revoked_at_us = key.revoked_at_us or now_us()
    return True
