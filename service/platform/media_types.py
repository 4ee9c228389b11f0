"""The media type that a request declares for its body."""

from __future__ import annotations

from starlette.requests import Request


def media_type_of(request: Request) -> str:
    """Return the media type of the request's Content-Type, without its parameters; "" if it declares none."""
    return request.headers.get("content-type", "").partition(";")[0].strip()
