"""Answers to polls: JSON bodies with an entity tag, built once for all who ask for the same."""

from __future__ import annotations

from typing import Any

from fastapi import Response, status
from pydantic import BaseModel

from foreshock_service.platform.etag import etag_of, matches

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The answer is still the one that If-None-Match names, after `wait` seconds"}
}


class Answer:
    """A body and its entity tag, which begins with the version that polls wait for a change of."""

    def __init__(self, version: str, model: BaseModel) -> None:
        self._body = model.model_dump_json().encode()
        self._headers = {"ETag": etag_of(version, self._body), "Cache-Control": "no-cache"}

    def response(self, if_none_match: str | None) -> Response:
        """Return the response: 304 if If-None-Match names these bytes."""
        if matches(if_none_match, self._headers["ETag"]):
            return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=self._headers)
        return Response(self._body, media_type="application/json", headers=self._headers)
