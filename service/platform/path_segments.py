"""Path segments that contain a slash: `%2F` in a path does not separate segments (RFC 3986, section 2.2).

The framework decodes a path before it looks for a route, which makes every slash a separator. An encoded slash is
therefore decoded to a control character that no name may contain, and to the slash by the handler.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

_STAND_IN = "\x1f"
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

SEGMENT_PATTERN = r"^[^\x00-\x1e\x7f]+$"
"""What a path parameter may hold that `decoded_segment` decodes: a name, and the stand-in."""


def keep_encoded_slashes(scope: Scope) -> Scope:
    """Return the scope of a request with the stand-in in its path for each encoded slash."""
    raw: bytes = scope.get("raw_path") or b""
    if not _ENCODED_SLASH.search(raw):
        return scope
    path = _ENCODED_SLASH.sub(b"%1F", raw.partition(b"?")[0])
    return {**scope, "path": unquote(path.decode("ascii", "replace"))}


def decoded_segment(segment: str) -> str:
    """Return a path parameter with its slashes."""
    return segment.replace(_STAND_IN, "/")
