"""The async twin of `ServiceConnection`, for the requests of an event loop."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from foreshock.client import exchange
from foreshock.client.exchange import Query

__all__ = ["AsyncServiceConnection"]


class AsyncServiceConnection:
    """HTTP requests to one service, with its API key. One connection serves many tasks of one event loop."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        self.url = exchange.checked_url(url)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=exchange.default_headers(api_key),
            timeout=exchange.timeout_of(timeout_seconds),
            # A key must not follow a redirect to another host.
            follow_redirects=False,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> httpx.Response:
        """Send a request and return the answer (2xx or 304). Raises ServiceError for any other, and for none."""
        try:
            response = await self._http.request(
                method,
                path,
                params=exchange.parameters_of(query),
                content=content,
                headers=headers,
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_seconds is None else exchange.timeout_of(timeout_seconds),
            )
        except exchange.FAILURES as error:
            raise exchange.no_answer(self.url, error) from error
        refusal = exchange.error_of(self.url, response)
        if refusal is not None:
            raise refusal
        return response

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()
