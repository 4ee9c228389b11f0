"""Answers of a plain route beside those of the declared route (`service/platform/plain_routes.py`)."""

from __future__ import annotations

import httpx

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys.service import Scope, create_key, new_secret

# A parameter that only the declared route knows; it changes nothing where the run is named by its id.
DECLARED = {"project": "any"}


def make_key(database: Database, *scopes: Scope, project: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the id of a new key, and the headers of a request with it."""
    secret = new_secret()
    key = database.write(lambda session: create_key(session, secret, "test", project, scopes).id)
    return key, {"Authorization": f"Bearer {secret}"}


def answer_of_both(
    http: httpx.Client, url: str, headers: dict[str, str] | None, parameters: dict[str, str | float]
) -> tuple[object, ...]:
    """Return the answer as (status, headers, body), which is that of the declared route too."""
    plain = _content_of(http.get(url, params=parameters, headers=headers))
    declared = _content_of(http.get(url, params={**parameters, **DECLARED}, headers=headers))
    assert plain == declared
    return plain


def _content_of(answer: httpx.Response) -> tuple[object, ...]:
    """Return the status, the headers and the body without what differs between any two requests."""
    headers = {name: text for name, text in answer.headers.items() if name not in ("date", "x-request-id")}
    body = answer.content
    if answer.is_error:
        body = repr({**answer.json(), "request_id": ""}).encode()
        headers.pop("content-length")
    return answer.status_code, headers, body
