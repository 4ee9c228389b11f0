"""The newest answers of a reader with their entity tags, so that what has not changed is not sent again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import httpx

__all__ = ["REMEMBERED_BYTES", "RememberedAnswers"]

REMEMBERED_BYTES = 16 << 20
"""What a reader holds at most; an answer of more than a quarter of it is not held."""


class RememberedAnswers:
    """Bodies by request; the one that was used longest ago goes first."""

    def __init__(self, most_bytes: int = REMEMBERED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[object, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def headers(self, request: object) -> Mapping[str, str]:
        """Return the header that asks for a body only if it has changed; none for a request without an answer here."""
        held = self._held.get(request)
        return {} if held is None else {"If-None-Match": held[0]}

    def body(self, request: object, response: httpx.Response) -> bytes:
        """Return the body of an answer, the one that is held for 304. Raises ValueError if none is held."""
        if response.status_code == httpx.codes.NOT_MODIFIED:
            if request not in self._held:
                raise ValueError("304 without a request for it")
            self._held.move_to_end(request)
            return self._held[request][1]
        body, tag = response.content, response.headers.get("ETag")
        self._forget(request)
        if tag is not None and len(body) <= self._most_bytes // 4:
            self._held[request] = (tag, body)
            self._bytes += len(body)
            while self._bytes > self._most_bytes:
                self._forget(next(iter(self._held)))
        return body

    def _forget(self, request: object) -> None:
        held = self._held.pop(request, None)
        if held is not None:
            self._bytes -= len(held[1])
