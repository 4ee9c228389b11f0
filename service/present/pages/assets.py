"""Static files with their version in the address: a browser may keep them for a year.

Plotly's script is its basic bundle (lines, bars and pies), released by its authors under the MIT license: a quarter of
the whole library, which a browser must read before the first plot. Every figure is made of lines and bars.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

LONG_CACHE = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"
PLOTLY = "plotly-basic.min.js"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def assets() -> dict[str, Traversable]:
    """Return every file that /static serves, by name."""
    return {
        item.name: item
        for item in files("foreshock_service.present.pages").joinpath("static").iterdir()
        if item.is_file()
    }


@cache
def digest_of(name: str) -> str:
    """Return the version in a file's address, a digest of its content."""
    return hashlib.sha256(assets()[name].read_bytes()).hexdigest()[:12]


def address_of(name: str) -> str:
    """Return the address of a static file, which changes when its content does."""
    return f"/static/{name}?v={digest_of(name)}"


def media_type_of(name: str) -> str:
    """Return the content type of a static file, by its ending."""
    return MEDIA_TYPES[name[name.rindex(".") :]]


@cache
def compressed(name: str) -> bytes:
    """Return a file's content in gzip, kept for the life of the process."""
    return gzip.compress(assets()[name].read_bytes(), 9, mtime=0)
