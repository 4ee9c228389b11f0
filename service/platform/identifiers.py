"""Server-made identifiers: sortable by time, random enough that they cannot be guessed, safe in a path and a URL."""

from __future__ import annotations

import re
import secrets

from foreshock.clock import now_us

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_identifier(kind: str) -> str:
    """Return `<kind>_` and 26 base-32 letters: 48 bits of UTC milliseconds, then 80 random bits."""
    number = ((now_us() // 1000) & (2**48 - 1)) << 80 | secrets.randbits(80)
    letters = [_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{kind}_{''.join(letters)}"


def is_identifier(kind: str, text: str) -> bool:
    """Return whether the text has the form of an identifier of this kind."""
    return re.fullmatch(rf"{kind}_[{_ALPHABET}]{{26}}", text) is not None
