"""Compression of answers by Accept-Encoding: zstd or gzip, whichever the client prefers."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# A smaller body fits one packet anyway.
_LEAST_BYTES = 1024
_GZIP = 16 + zlib.MAX_WBITS


def _gzip(body: bytes) -> bytes:
    # Level 1: six times as fast as the default for JSON of numbers, and 5 % larger.
    compressor = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    return compressor.compress(body) + compressor.flush()


def _zstd(body: bytes) -> bytes:
    return zstd.compress(body, 1)


# In the order of preference of equal q.
_ENCODERS: dict[str, Callable[[bytes], bytes]] = {"zstd": _zstd, "gzip": _gzip}


def compress(body: bytes, accept_encoding: str | None) -> tuple[bytes, str | None]:
    """Return the body in the accepted encoding with the highest q, and its name; unchanged and None if there is none.

    Both release the GIL, but take milliseconds for a megabyte: call it outside the event loop for large bodies.
    """
    name = preferred_encoding(accept_encoding)
    if name is None or len(body) < _LEAST_BYTES:
        return body, None
    return _ENCODERS[name](body), name


def preferred_encoding(accept_encoding: str | None) -> str | None:
    """Return `zstd` or `gzip`, whichever the Accept-Encoding header names with the higher q; None for neither."""
    qualities: dict[str, float] = {}
    for part in (accept_encoding or "").lower().split(","):
        name, _, parameter = part.partition(";")
        try:
            qualities[name.strip()] = float(parameter.partition("=")[2]) if parameter else 1.0
        except ValueError:
            qualities[name.strip()] = 0.0
    wildcard = qualities.get("*", 0.0)
    offered = {name: qualities.get(name, wildcard) for name in _ENCODERS}
    best = max(offered, key=lambda name: offered[name])
    # `identity` is acceptable by default; one that is preferred is used.
    if offered[best] <= 0 or offered[best] < qualities.get("identity", 0.0):
        return None
    return best
