"""Compress answers, and provide zstd: from Python's own module since 3.14, else from the backport."""

import sys
import zlib

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["compressed", "zstd"]


def compressed(body: bytes, accept_encoding: str | None) -> tuple[bytes, dict[str, str]]:
    """Return the body compressed with zstd or gzip, if the client accepts one, and the Content-Encoding header.

    Starlette's GZipMiddleware is not used: it compresses in the event loop, which serves no other request meanwhile
    (60 ms for the 4 MB of 20 measures over 10,000 steps). Level 1 is six times as fast as the default for JSON numbers.
    """
    # A smaller body fits one packet anyway.
    if len(body) < 1024:
        return body, {}
    if _accepts(accept_encoding, "zstd"):
        return zstd.compress(body, 1), {"Content-Encoding": "zstd"}
    if not _accepts(accept_encoding, "gzip"):
        return body, {}
    compressor = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush(), {"Content-Encoding": "gzip"}


def _accepts(accept_encoding: str | None, coding: str) -> bool:
    """Return whether an Accept-Encoding header accepts a coding, by its own quality or that of `*` (RFC 9110)."""
    qualities: dict[str, str] = {}
    for each in (accept_encoding or "").lower().split(","):
        name, _, quality = each.partition(";")
        qualities[name.strip()] = quality.partition("=")[2].strip() or "1"
    # A quality of zero, which has up to three decimal digits, refuses the coding.
    return bool(qualities.get(coding, qualities.get("*", "0")).strip("0."))
