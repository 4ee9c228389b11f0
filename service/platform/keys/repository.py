"""Queries on API keys and ended page sessions."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_if_absent
from foreshock_service.platform.database.tables import ApiKey, EndedSession, RetiredSecret


def find(session: Session, key_id: str) -> ApiKey | None:
    """Return the key with this id."""
    return session.get(ApiKey, key_id)


def find_by_hash(session: Session, secret_hash: str) -> ApiKey | None:
    """Return the key whose secret has this hash."""
    return session.scalar(select(ApiKey).where(ApiKey.secret_hash == secret_hash))


def find_retired(session: Session, secret_hash: str) -> RetiredSecret | None:
    """Return the retired secret with this hash."""
    return session.get(RetiredSecret, secret_hash)


def retire(session: Session, key: ApiKey, valid_until_us: int) -> None:
    """Make the key's secret a retired one, and end the earlier retired ones no later."""
    earlier = update(RetiredSecret).where(RetiredSecret.key_id == key.id, RetiredSecret.valid_until_us > valid_until_us)
    session.execute(earlier.values(valid_until_us=valid_until_us))
    row = {"secret_hash": key.secret_hash, "key_id": key.id, "valid_until_us": valid_until_us}
    insert_if_absent(session, RetiredSecret, row)


def any_exists(session: Session) -> bool:
    """Return whether there is any key, revoked ones included."""
    return session.scalar(select(ApiKey.id).limit(1)) is not None


def all_keys(session: Session) -> Sequence[ApiKey]:
    """Return every key, oldest first."""
    return session.scalars(select(ApiKey).order_by(ApiKey.created_at_us, ApiKey.id)).all()


def note_use(session: Session, key_id: str, used_at_us: int, least_apart_us: int) -> None:
    """Note the last use of a key, unless one less than `least_apart_us` before is noted."""
    before = ApiKey.last_used_at_us <= used_at_us - least_apart_us
    statement = update(ApiKey).where(ApiKey.id == key_id, or_(ApiKey.last_used_at_us.is_(None), before))
    session.execute(statement.values(last_used_at_us=used_at_us))


def end_session(session: Session, session_hash: str, expires_at_us: int) -> None:
    """Note that a session has ended."""
    insert_if_absent(session, EndedSession, {"session_hash": session_hash, "expires_at_us": expires_at_us})


def has_ended(session: Session, session_hash: str) -> bool:
    """Return whether a session was ended."""
    return session.get(EndedSession, session_hash) is not None


def forget_expired_sessions(session: Session, now_us: int) -> None:
    """Delete the ended sessions that would have expired by now."""
    session.execute(delete(EndedSession).where(EndedSession.expires_at_us < now_us))
