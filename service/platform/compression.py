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
    accepted = {
        name.strip()
        for name, _, quality in (each.partition(";") for each in (accept_encoding or "").lower().split(","))
        if quality.replace(" ", "") not in ("q=0", "q=0.0")
    }
    # A smaller body fits one packet anyway.
    if len(body) < 1024 or not accepted & {"zstd", "gzip", "*"}:
        return body, {}
    if accepted & {"zstd", "*"}:
        return zstd.compress(body, 1), {"Content-Encoding": "zstd"}
    compressor = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush(), {"Content-Encoding": "gzip"}
