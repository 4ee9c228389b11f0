"""Answers of columnar endpoints: entity tag, 304, and compression, all in the thread that made the body."""

from __future__ import annotations

from fastapi import Request, Response

from foreshock_service.platform.content_tags import content_etag
from foreshock_service.platform.etag import matches
from foreshock_service.platform.response_encoding import compress

VARY = "Accept, Accept-Encoding"


def columnar_response(request: Request, body: bytes, media_type: str, etag: str | None = None) -> Response:
    """Return the body with its entity tag (that of its content unless it is given), or 304 if the client has it."""
    etag = etag or content_etag(body)
    headers = {"ETag": etag, "Vary": VARY, "Cache-Control": "private, no-cache"}
    if is_known(request, etag):
        return Response(status_code=304, headers=headers)
    body, encoding = compress(body, request.headers.get("accept-encoding"))
    if encoding is not None:
        headers["Content-Encoding"] = encoding
    return Response(body, media_type=media_type, headers=headers)


def is_known(request: Request, etag: str) -> bool:
    """Return whether the client has the answer with this entity tag."""
    return matches(request.headers.get("if-none-match"), etag)


def etag_of_version(version: str, media_type: str) -> str:
    """Return the entity tag of an answer that is known by a version before it is made."""
    return f'W/"{version}.{media_type.rpartition("/")[2].rpartition(".")[2]}"'
