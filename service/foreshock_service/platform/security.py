"""API keys and page sessions: who acts in a request, and what they may do.

Only the hash of a key's secret is stored. A bearer key or a signed session cookie becomes a Principal, and
`require(scope)` guards an endpoint. If no key was ever made, the service binds loopback only and every request is an
unbound principal with all scopes.
"""

import getpass
import hashlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from itsdangerous import BadSignature, Signer, URLSafeTimedSerializer
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey, EndedSession, RetiredSecret, new_identifier
from foreshock_service.platform.problem import ProblemError

SESSION_COOKIE = "foreshock_session"
SESSION_SECONDS = 12 * 3600
"""Lifetime of a session."""
# The salts keep a token of one purpose from being accepted for the other.
_SESSION, _FORM = "foreshock.session", "foreshock.form"
_ALGORITHM = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
# For the OpenAPI document only: `authenticate` reads the header itself.
_BEARER = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer fsk_…`")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


class AuthenticationRequired(ProblemError, status=401, problem_type="authentication-required"):
    """No key, an unknown, revoked or expired key, or a session that has ended."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class ScopeMissing(ProblemError, status=403, problem_type="scope-missing"):
    """A valid key without the scope that the endpoint requires."""


class Scope(StrEnum):
    """Permission of a key; `admin` includes the others."""

    INGEST = "ingest"
    READ = "read"
    WORKER = "worker"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who acts. `project` None: every project. `key_id` None: no key exists, or the service or its operator acts."""

    key_id: str | None
    project: str | None
    scopes: frozenset[Scope]
    without_key: str = "anonymous"

    @property
    def actor(self) -> str:
        return self.key_id or self.without_key

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def sees(self, project: str) -> bool:
        return self.project is None or self.project == project

    def projects(self, asked: str | None) -> tuple[str, ...]:
        """Return the conditions on a run's project in a list: it must equal the principal's, and `asked` if given."""
        return tuple(project for project in (self.project, asked) if project is not None)


UNRESTRICTED = Principal(None, None, frozenset(Scope))
SERVICE = replace(UNRESTRICTED, without_key="service")


def operator() -> Principal:
    return replace(UNRESTRICTED, without_key=f"console:{getpass.getuser()}")


def new_secret() -> str:
    """Return a new API key: the prefix that secret scanners look for, then 256 random bits."""
    return f"fsk_{secrets.token_urlsafe(32)}"


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
    return session.scalars(select(ApiKey).where(ApiKey.secret_hash == row["secret_hash"])).one()


def find_key_by_secret(session: Session, secret: str) -> ApiKey | None:
    """Return the key with this secret, revoked or not. One that was rotated away counts while it is still valid."""
    secret_hash = hash_secret(secret)
    key = session.scalar(select(ApiKey).where(ApiKey.secret_hash == secret_hash))
    retired = session.get(RetiredSecret, secret_hash) if key is None else None
    if retired is not None and now_us() < retired.valid_until_us:
        return session.get(ApiKey, retired.key_id)
    return key


def was_ever_a_secret(session: Session, secret: str) -> bool:
    secret_hash = hash_secret(secret)
    known = session.scalar(select(ApiKey.id).where(ApiKey.secret_hash == secret_hash))
    return known is not None or session.get(RetiredSecret, secret_hash) is not None


def is_valid(key: ApiKey) -> bool:
    return key.revoked_at_us is None and (key.expires_at_us is None or now_us() < key.expires_at_us)


def describe(key: ApiKey) -> dict[str, Any]:
    """Return what the audit records of a key: its name, project, scopes and expiry."""
    return {"name": key.name, "project": key.project, "scopes": list(key.scopes), "expires_at_us": key.expires_at_us}


def keys_exist(session: Session) -> bool:
    """Return whether a key was ever made, even a revoked one. If so, requests without a key are refused."""
    return session.scalar(select(ApiKey.id).limit(1)) is not None


def rotate_key(session: Session, key_id: str, secret: str, overlap_seconds: float) -> ApiKey:
    """Give a key a new secret. Raises ConfigurationError if there is no such key.

    The old secret stays valid for `overlap_seconds`. Existing page sessions end at once.
    """
    key = _known(session, key_id)
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


def revoke_key(session: Session, key_id: str) -> ApiKey:
    """Revoke a key for good, with every secret it had. Raises ConfigurationError if there is no such key."""
    key = _known(session, key_id)
    key.revoked_at_us = key.revoked_at_us or now_us()
    return key


def _known(session: Session, key_id: str) -> ApiKey:
    key = session.get(ApiKey, key_id)
    if key is None:
        raise ConfigurationError(f"there is no key {key_id}: see `foreshock keys list`")
    return key


def sign_session(secret: bytes, key_id: str) -> str:
    """Return the value of a new session cookie; a random part makes each value unique."""
    return _sessions(secret).dumps([key_id, now_us(), secrets.token_urlsafe(12)])


def verify_session(secret: bytes, cookie: str, lifetime_seconds: float = SESSION_SECONDS) -> tuple[str, int] | None:
    """Return the key of a session and when it was signed; None if that was elsewhere or longer ago than a lifetime."""
    try:
        key_id, signed_at_us, _ = _sessions(secret).loads(cookie, max_age=int(lifetime_seconds))
    except BadSignature:
        return None
    return key_id, signed_at_us


def end_session(database: Database, secret: bytes, cookie: str) -> None:
    """End a page session for good; the row is kept for the lifetime of a session."""
    # Only a cookie that this service signed is stored, because anyone can send cookies.
    if verify_session(secret, cookie) is not None:
        ends = now_us() + SESSION_SECONDS * 1_000_000
        row = {"session_hash": hash_secret(cookie), "expires_at_us": ends}
        database.write(lambda session: insert_if_absent(session, EndedSession, row))


def form_token(secret: bytes, cookie: str) -> str:
    return _forms(secret).get_signature(cookie).decode()


def is_form_token(secret: bytes, cookie: str, token: str) -> bool:
    """Return True if the token belongs to the session; compared in constant time."""
    return _forms(secret).verify_signature(cookie, token.encode())


def _sessions(secret: bytes) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(secret, salt=_SESSION, signer_kwargs=_ALGORITHM)


def _forms(secret: bytes) -> Signer:
    return Signer(secret, salt=_FORM, **_ALGORITHM)  # type: ignore[arg-type]


def require(scope: Scope) -> Callable[..., Principal]:
    """Return the dependency for a scope: `principal: Annotated[Principal, Depends(require(Scope.READ))]`."""

    def principal_with_scope(request: Request, context: Context, _: Bearer) -> Principal:
        principal = authenticate(context, request)
        check_scope(principal, scope)
        return principal

    return principal_with_scope


def check_scope(principal: Principal, needed: Scope) -> None:
    if not principal.may(needed):
        raise ScopeMissing(f"this key lacks the scope `{needed}`")


Reader = Annotated[Principal, Depends(require(Scope.READ))]
Ingester = Annotated[Principal, Depends(require(Scope.INGEST))]
Worker = Annotated[Principal, Depends(require(Scope.WORKER))]
Administrator = Annotated[Principal, Depends(require(Scope.ADMIN))]


def authenticate(context: ServiceContext, request: Request) -> Principal:
    """Return the principal of a request, from its bearer key or its session cookie.

    Counts the request once against the key's limits. Raises AuthenticationRequired and TooManyRequests.
    """
    known: Principal | None = getattr(request.state, "principal", None)
    if known is not None:
        return known
    scheme, value = get_authorization_scheme_param(request.headers.get("authorization"))
    secret = value if scheme.lower() == "bearer" and value else None
    cookie = request.cookies.get(SESSION_COOKIE, "") if secret is None else ""
    signed = verify_session(context.session_secret, cookie) if cookie else None
    if signed is not None:
        principal = _principal_of_session(context, *signed, cookie)
    else:
        principal = principal_of_secret(context, secret)
    if principal.key_id is not None:
        context.key_uses.note(principal.key_id)
        context.key_limits.admit(principal.key_id)
        # `uploads.py` counts the uploads of the key.
        request.state.key_id = principal.key_id
    request.state.principal = principal
    return principal


def principal_of_secret(context: ServiceContext, secret: str | None) -> Principal:
    """Return the principal of an API key, or of a request without one.

    Raises AuthenticationRequired unless the key is known and valid, or there are no keys.
    """
    with context.database.read() as session:
        key = None if secret is None else find_key_by_secret(session, secret)
        if key is None and not keys_exist(session):
            return UNRESTRICTED
    if secret is None:
        raise AuthenticationRequired("send an API key: Authorization: Bearer fsk_…")
    if key is None or not is_valid(key):
        raise AuthenticationRequired("this API key is unknown, revoked or expired")
    return _principal(key)


def _principal_of_session(context: ServiceContext, key_id: str, signed_at_us: int, cookie: str) -> Principal:
    with context.database.read() as session:
        key = session.get(ApiKey, key_id)
        ended = session.get(EndedSession, hash_secret(cookie)) is not None
    if key is None or ended or not is_valid(key) or signed_at_us < key.sessions_from_us:
        raise AuthenticationRequired("this session has ended: log in again")
    return _principal(key)


def _principal(key: ApiKey) -> Principal:
    return Principal(key.id, key.project, frozenset(map(Scope, key.scopes)))
