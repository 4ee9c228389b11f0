"""Signed values of the pages: the session cookie, and the token that proves that a form came from the same session."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from secrets import token_urlsafe

from itsdangerous import BadSignature, Signer, URLSafeTimedSerializer

from foreshock.clock import now_us

# The salts keep a token of one purpose from being accepted for the other.
_SESSION, _FORM = "foreshock.session", "foreshock.form"
_ALGORITHM = {"key_derivation": "hmac", "digest_method": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class SignedSession:
    """What a session cookie holds: the key, and when it was signed."""

    key_id: str
    signed_at_us: int


def sign_session(secret: bytes, key_id: str) -> str:
    """Return the value of a new session cookie; a random part makes each one differ."""
    return _sessions(secret).dumps([key_id, now_us(), token_urlsafe(12)])


def verify_session(secret: bytes, cookie: str, lifetime_seconds: float) -> SignedSession | None:
    """Return what a session cookie holds; None if it was not signed here or is older than its lifetime."""
    try:
        held = _sessions(secret).loads(cookie, max_age=int(lifetime_seconds))
    except BadSignature:
        return None
    if not isinstance(held, list) or [type(part) for part in held] != [str, int, str]:
        return None
    return SignedSession(held[0], held[1])


def session_hash(cookie: str) -> str:
    """Return what is stored of a session that was ended."""
    return hashlib.sha256(cookie.encode()).hexdigest()


def form_token(secret: bytes, cookie: str) -> str:
    """Return the CSRF token of the forms that a session shows."""
    return _forms(secret).get_signature(cookie).decode()


def is_form_token(secret: bytes, cookie: str, token: str) -> bool:
    """Return True if the token is that of the session, in constant time."""
    return _forms(secret).verify_signature(cookie, token.encode())


def _sessions(secret: bytes) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(secret, salt=_SESSION, signer_kwargs=_ALGORITHM)


def _forms(secret: bytes) -> Signer:
    return Signer(secret, salt=_FORM, **_ALGORITHM)  # type: ignore[arg-type]
