"""Responses of the pages: rendered templates and figures, with an entity tag and the browser's restrictions."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from functools import cache
from importlib.metadata import version

from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from foreshock_service.platform.etag import matches
from foreshock_service.present.pages.assets import PLOTLY, REVALIDATE, address_of
from foreshock_service.present.pages.figures import Figure, Missing, sparkline
from foreshock_service.present.pages.view_models import Visitor

# Plotly sets style attributes on what it draws, and puts an empty <style> into the page, whose rules it adds by script:
# the first hash is that of the empty text. The second is the style of its map library, which plotly.js 4 adds when it
# is loaded, maps or not; with another version the browser refuses it, and nothing that these pages draw misses it.
PLOTLY_STYLES = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
)

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src-elem 'self' {PLOTLY_STYLES}",
        "style-src-attr 'unsafe-inline'",
        # A plot is saved as PNG by drawing a blob of its SVG.
        "img-src 'self' blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

LEAST_COMPRESSED = 1024
"""Bytes of a body from which it is compressed."""

PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@cache
def templates() -> Environment:
    """Return the template environment. Every value is escaped unless a template marks it as safe."""
    environment = Environment(
        loader=PackageLoader("foreshock_service.present.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["code"] = with_code
    environment.globals.update(static=address_of, plotly=address_of(PLOTLY), version=version("foreshock"))
    environment.globals.update(tile_width=sparkline.WIDTH, tile_height=sparkline.HEIGHT)
    return environment


def with_code(text: str) -> Markup:
    """Return the text escaped, with text between backticks as code; a single backtick stays."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def page_response(
    request: Request, template: str, page: object, visitor: Visitor | None, *, status: int = 200
) -> Response:
    """Return the page as HTML; 304 if the browser already has it."""
    text = templates().get_template(template).render(page=page, visitor=visitor)
    return _tagged(request, text.encode(), "text/html; charset=utf-8", status)


def figure_response(request: Request, figure: Figure | Missing) -> Response:
    """Return a figure's specification as JSON; 304 if the browser has drawn it already."""
    return json_response(request, figure.to_json())


def json_response(request: Request, value: object) -> Response:
    """Return a value as JSON; 304 if the browser has it already."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _tagged(request, body.encode(), "application/json", 200)


def accepts_gzip(request: Request) -> bool:
    """Return whether the browser takes gzip; `gzip;q=0` does not occur in browsers."""
    return "gzip" in request.headers.get("accept-encoding", "")


def _tagged(request: Request, body: bytes, media_type: str, status: int) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**PAGE_HEADERS, "ETag": tag, "Cache-Control": f"private, {REVALIDATE}", "Vary": "Accept-Encoding"}
    if status == 200 and matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    if len(body) >= LEAST_COMPRESSED and accepts_gzip(request):
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(body, 5, mtime=0)
    return Response(body, status_code=status, media_type=media_type, headers=headers)
