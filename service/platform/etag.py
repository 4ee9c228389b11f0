"""Entity tags: made from the versions that an answer depends on, compared as RFC 9110 defines for If-None-Match."""

from __future__ import annotations


def etag_of(*versions: int | str) -> str:
    """Return the strong entity tag of these versions."""
    return '"' + "-".join(str(version) for version in versions) + '"'


def matches(if_none_match: str | None, etag: str) -> bool:
    """Return True if an If-None-Match header names `etag` (weakly compared) or is `*`."""
    if if_none_match is None:
        return False
    known = [candidate.strip().removeprefix("W/") for candidate in if_none_match.split(",")]
    return "*" in known or etag.removeprefix("W/") in known
