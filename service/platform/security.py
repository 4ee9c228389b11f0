"""Authorization: API keys and signed page sessions become a Principal, and `require(scope)` guards an endpoint.

If no key was ever made, the service binds loopback only and every request is an unbound principal with all scopes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session

from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.tables import ApiKey
from foreshock_service.platform.keys import (
    Scope,
    find_key,
    find_key_by_secret,
    has_session_ended,
    is_valid,
    keys_exist,
)
from foreshock_service.platform.logs import current_request_id
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.signing import SignedSession, session_hash, verify_session

SESSION_COOKIE = "foreshock_session"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
bearer = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer fsk_…`")


class AuthenticationRequired(ProblemError):
    """No key, an unknown, revoked or expired key, or a session that has ended."""

    status = 401
    problem_type = "authentication-required"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class ScopeMissing(ProblemError):
    """A valid key without the scope that the endpoint requires."""

    status = 403
    problem_type = "scope-missing"


class CrossSiteRefused(ProblemError):
    """A browser request that did not come from the service's own pages."""

    status = 403
    problem_type = "cross-site-refused"


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of a request. `project` None: bound to no project; `key_id` None: the service has no keys."""

    key_id: str | None
    project: str | None
    scopes: frozenset[Scope]
    request_id: str | None = field(default=None, compare=False)

    @property
    def actor(self) -> str:
        """What the audit calls it."""
        return self.key_id or "anonymous"

    def may(self, scope: Scope) -> bool:
        """Return True if the principal has the scope or `admin`."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def sees(self, project: str) -> bool:
        """Return True if this principal may see runs of the project."""
        return self.project is None or self.project == project

    def projects(self, asked: str | None) -> tuple[str, ...]:
        """Return the names that a run's project must equal, all of them, in a list of the project `asked`."""
        return tuple(project for project in (self.project, asked) if project is not None)


UNRESTRICTED = Principal(None, None, frozenset(Scope))


def require(scope: Scope | str) -> Callable[..., Principal]:
    """Return the dependency for a scope: `principal: Annotated[Principal, Depends(require("read"))]`."""
    needed = Scope(scope)

    def principal_with_scope(
        request: Request,
        context: Context,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
    ) -> Principal:
        principal = authenticate(context, request, credentials.credentials if credentials else None)
        check_scope(principal, needed)
        return principal

    return principal_with_scope


def check_scope(principal: Principal, needed: Scope) -> None:
    """Raise ScopeMissing unless the principal has the scope."""
    if not principal.may(needed):
        raise ScopeMissing(f"this key lacks the scope `{needed}`")


Reader = Annotated[Principal, Depends(require(Scope.READ))]
Ingester = Annotated[Principal, Depends(require(Scope.INGEST))]
Worker = Annotated[Principal, Depends(require(Scope.WORKER))]
Administrator = Annotated[Principal, Depends(require(Scope.ADMIN))]


def authenticate(context: ServiceContext, request: Request, bearer: str | None) -> Principal:
    """Return the principal of a request, from its bearer key or its session cookie.

    Counts the request against the key's limits. Raises AuthenticationRequired and TooManyRequests.
    """
    return admit(context, request, _principal_of(context, request, bearer))


def admit(context: ServiceContext, request: Request, principal: Principal) -> Principal:
    """Count the request against the limits of its key; return the principal with the request's id.

    Raises TooManyRequests.
    """
    if principal.key_id is not None:
        context.key_uses.note(principal.key_id)
        context.key_limits.admit(principal.key_id)
        # `guards.py` charges the bytes of the body to the key, `uploads.py` counts its uploads.
        request.state.key_id = principal.key_id
    return replace(principal, request_id=current_request_id())


def _principal_of(context: ServiceContext, request: Request, bearer: str | None) -> Principal:
    if bearer is not None:
        return principal_of_secret(context, bearer)
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie is not None:
        signed = verify_session(context.session_secret, cookie, context.settings.session_hours * 3600)
        if signed is not None:
            _refuse_foreign_form(request)
            return _principal_of_session(context, signed, cookie)
    return principal_of_secret(context, None)


def principal_of_secret(context: ServiceContext, secret: str | None) -> Principal:
    """Return the principal of an API key, or of a request without one. Raises as `principal_of_key`."""
    with context.database.read() as session:
        return principal_of_key(session, secret)


def principal_of_key(session: Session, secret: str | None) -> Principal:
    """Return the principal of an API key, or of a request without one.

    Raises AuthenticationRequired unless the key is known and valid, or there are no keys.
    """
    key = None if secret is None else find_key_by_secret(session, secret)
    if key is None and not keys_exist(session):
        return UNRESTRICTED
    if secret is None:
        raise AuthenticationRequired("send an API key: Authorization: Bearer fsk_…")
    if key is None or not is_valid(key):
        raise AuthenticationRequired("this API key is unknown, revoked or expired")
    return _principal(key)


def _principal_of_session(context: ServiceContext, signed: SignedSession, cookie: str) -> Principal:
    with context.database.read() as session:
        key = find_key(session, signed.key_id)
        ended = has_session_ended(session, session_hash(cookie))
    if key is None or ended or not is_valid(key) or signed.signed_at_us < key.sessions_from_us:
        raise AuthenticationRequired("this session has ended: log in again")
    return _principal(key)


def _principal(key: ApiKey) -> Principal:
    return Principal(key.id, key.project, frozenset(Scope(scope) for scope in key.scopes))


def _refuse_foreign_form(request: Request) -> None:
    # SameSite=Strict already keeps other sites from sending the cookie; some browsers ignore it.
    if request.method in SAFE_METHODS:
        return
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise CrossSiteRefused("a session is valid only for this site's own pages")
