"""Static files with their version in the address, Plotly's script among them: a browser may keep them for a year."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable

LONG_CACHE = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"
PLOTLY = "plotly.min.js"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def assets() -> dict[str, Traversable]:
    """Return every file that /static serves, by name."""
    own = {item.name: item for item in files("service.present.pages").joinpath("static").iterdir() if item.is_file()}
    # The script that belongs to the installed `plotly` package: no download, no content delivery network.
    return own | {PLOTLY: files("plotly").joinpath("package_data", PLOTLY)}


@cache
def digest_of(name: str) -> str:
    """Return the version in a file's address: a digest; for Plotly, which has 4 MB, its version."""
    if name == PLOTLY:
        return version("plotly")
    return hashlib.sha256(assets()[name].read_bytes()).hexdigest()[:12]


def address_of(name: str) -> str:
    """Return the address of a static file, which changes when its content does."""
    return f"/static/{name}?v={digest_of(name)}"


def media_type_of(name: str) -> str:
    """Return the content type of a static file, by its ending."""
    return MEDIA_TYPES[name[name.rindex(".") :]]
