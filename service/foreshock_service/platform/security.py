"""Authorization: API keys and signed page sessions become a Principal, and `require(scope)` guards an endpoint.

If no key was ever made, the service binds loopback only and every request is an unbound principal with all scopes.
"""

import getpass
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from secrets import token_urlsafe
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from itsdangerous import BadSignature, Signer, URLSafeTimedSerializer

from foreshock.clock import now_us
from foreshock_service.platform import keys, problem
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.tables import ApiKey, EndedSession

# The salts keep a token of one purpose from being accepted for the other.
_SESSION, _FORM = "foreshock.session", "foreshock.form"
_ALGORITHM = {"key_derivation": "hmac", "digest_method": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class SignedSession:
    """The contents of a session cookie: the key, and the time of signing."""

    key_id: str
    signed_at_us: int


def sign_session(secret: bytes, key_id: str) -> str:
    """Return the value of a new session cookie; a random part makes each value unique."""
    return _sessions(secret).dumps([key_id, now_us(), token_urlsafe(12)])


def verify_session(secret: bytes, cookie: str, lifetime_seconds: float) -> SignedSession | None:
    """Return the contents of a session cookie; None if it was not signed here or is older than its lifetime."""
    try:
        held = _sessions(secret).loads(cookie, max_age=int(lifetime_seconds))
    except BadSignature:
        return None
    if not isinstance(held, list) or [type(part) for part in held] != [str, int, str]:
        return None
    return SignedSession(held[0], held[1])


def session_hash(cookie: str) -> str:
    """Return the hash under which an ended session is stored."""
    return hashlib.sha256(cookie.encode()).hexdigest()


def form_token(secret: bytes, cookie: str) -> str:
    """Return the CSRF token of the forms that a session shows."""
    return _forms(secret).get_signature(cookie).decode()


def is_form_token(secret: bytes, cookie: str, token: str) -> bool:
    """Return True if the token belongs to the session; compared in constant time."""
    return _forms(secret).verify_signature(cookie, token.encode())


def _sessions(secret: bytes) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(secret, salt=_SESSION, signer_kwargs=_ALGORITHM)


def _forms(secret: bytes) -> Signer:
    return Signer(secret, salt=_FORM, **_ALGORITHM)  # type: ignore[arg-type]


SESSION_COOKIE = "foreshock_session"
SESSION_SECONDS = 12 * 3600
"""Lifetime of a session."""
# For the OpenAPI document only: `authenticate` reads the header itself.
_BEARER = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer fsk_…`")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


class AuthenticationRequired(problem.ProblemError, status=401, problem_type="authentication-required"):
    """No key, an unknown, revoked or expired key, or a session that has ended."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class ScopeMissing(problem.ProblemError, status=403, problem_type="scope-missing"):
    """A valid key without the scope that the endpoint requires."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who acts. `project` None: every project. `key_id` None: no key exists, or the service or its operator acts."""

    key_id: str | None
    project: str | None
    scopes: frozenset[keys.Scope]
    without_key: str = "anonymous"

    @property
    def actor(self) -> str:
        """Its name in the log of changes."""
        return self.key_id or self.without_key

    def may(self, scope: keys.Scope) -> bool:
        """Return True if the principal has the scope or `admin`."""
        return scope in self.scopes or keys.Scope.ADMIN in self.scopes

    def sees(self, project: str) -> bool:
        """Return True if this principal may see runs of the project."""
        return self.project is None or self.project == project

    def projects(self, asked: str | None) -> tuple[str, ...]:
        """Return the conditions on a run's project in a list: it must equal the principal's, and `asked` if given."""
        return tuple(project for project in (self.project, asked) if project is not None)


UNRESTRICTED = Principal(None, None, frozenset(keys.Scope))
SERVICE = replace(UNRESTRICTED, without_key="service")


def operator() -> Principal:
    """Return the operator who runs this process at the console."""
    return replace(UNRESTRICTED, without_key=f"console:{getpass.getuser()}")


def require(scope: keys.Scope | str) -> Callable[..., Principal]:
    """Return the dependency for a scope: `principal: Annotated[Principal, Depends(require("read"))]`."""
    needed = keys.Scope(scope)

    def principal_with_scope(request: Request, context: Context, _: Bearer) -> Principal:
        principal = authenticate(context, request)
        check_scope(principal, needed)
        return principal

    return principal_with_scope


def check_scope(principal: Principal, needed: keys.Scope) -> None:
    """Raise ScopeMissing unless the principal has the scope."""
    if not principal.may(needed):
        raise ScopeMissing(f"this key lacks the scope `{needed}`")


Reader = Annotated[Principal, Depends(require(keys.Scope.READ))]
Ingester = Annotated[Principal, Depends(require(keys.Scope.INGEST))]
Worker = Annotated[Principal, Depends(require(keys.Scope.WORKER))]
Administrator = Annotated[Principal, Depends(require(keys.Scope.ADMIN))]


def authenticate(context: ServiceContext, request: Request) -> Principal:
    """Return the principal of a request, from its bearer key or its session cookie.

    Counts the request once against the key's limits. Raises AuthenticationRequired and TooManyRequests.
    """
    known: Principal | None = getattr(request.state, "principal", None)
    if known is not None:
        return known
    scheme, value = get_authorization_scheme_param(request.headers.get("authorization"))
    secret = value if scheme.lower() == "bearer" and value else None
    cookie = request.cookies.get(SESSION_COOKIE) if secret is None else None
    signed = None
    if cookie is not None:
        signed = verify_session(context.session_secret, cookie, SESSION_SECONDS)
    if cookie is not None and signed is not None:
        principal = _principal_of_session(context, signed, cookie)
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
        key = None if secret is None else keys.find_key_by_secret(session, secret)
        if key is None and not keys.keys_exist(session):
            return UNRESTRICTED
    if secret is None:
        raise AuthenticationRequired("send an API key: Authorization: Bearer fsk_…")
    if key is None or not keys.is_valid(key):
        raise AuthenticationRequired("this API key is unknown, revoked or expired")
    return _principal(key)


def _principal_of_session(context: ServiceContext, signed: SignedSession, cookie: str) -> Principal:
    with context.database.read() as session:
        key = session.get(ApiKey, signed.key_id)
        ended = session.get(EndedSession, session_hash(cookie)) is not None
    if key is None or ended or not keys.is_valid(key) or signed.signed_at_us < key.sessions_from_us:
        raise AuthenticationRequired("this session has ended: log in again")
    return _principal(key)


def _principal(key: ApiKey) -> Principal:
    return Principal(key.id, key.project, frozenset(keys.Scope(scope) for scope in key.scopes))
