"""Signed values of the pages: the session cookie, and the token that proves that a form came from the same session."""

from __future__ import annotations

import hashlib

from itsdangerous import BadSignature, Signer, URLSafeTimedSerializer

# The salts keep a token of one purpose from being accepted for the other.
_SESSION, _FORM = "foreshock.session", "foreshock.form"
_ALGORITHM = {"key_derivation": "hmac", "digest_method": hashlib.sha256}


def sign_session(secret: bytes, key_id: str) -> str:
    """Return the value of a session cookie: the key id and the time of signing, signed."""
    return _sessions(secret).dumps(key_id)


def verify_session(secret: bytes, cookie: str, lifetime_seconds: float) -> str | None:
    """Return the key id in a session cookie; None if it was not signed here or is older than its lifetime."""
    try:
        key_id = _sessions(secret).loads(cookie, max_age=int(lifetime_seconds))
    except BadSignature:
        return None
    return key_id if isinstance(key_id, str) else None


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
