"""Sending of one message to one target: no redirect is followed, and no address or token gets into a log."""

from __future__ import annotations

import json

import httpx

from foreshock_service.platform.notification_targets import NotificationTarget
from foreshock_service.watch.notifications.messages import Message, address_and_body

TIMEOUT_SECONDS = 10.0
_SHOWN_CHARACTERS = 200


class SendingFailed(Exception):
    """The target did not take the message; the text has no secret. `retry_after_seconds`: as the target asked."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def send(target: NotificationTarget, message: Message, now_us: int) -> None:
    """POST the message. Raises SendingFailed unless the answer is 2xx."""
    address, body = address_and_body(target, message, now_us)
    # A repeated message has the same key, so that a receiver can tell it from a second one.
    headers = {"User-Agent": "foreshock", "Content-Type": "application/json", "Idempotency-Key": message.id}
    if target.token is not None:
        headers["Authorization"] = f"Bearer {target.token.get_secret_value()}"
    timeout = httpx.Timeout(TIMEOUT_SECONDS).as_dict()
    try:
        request = httpx.Request(
            "POST", address, headers=headers, content=json.dumps(body).encode(), extensions={"timeout": timeout}
        )
        # The transport itself: httpx.Client logs addresses, which hold Slack's token, and may follow redirects.
        with httpx.HTTPTransport() as transport:
            response = transport.handle_request(request)
            try:
                text = _start_of(response) if response.status_code >= 300 else ""
            finally:
                response.close()
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise SendingFailed(_without_secrets(target, f"{type(error).__name__}: {error}")) from None
    if response.status_code < 300:
        return
    if response.status_code < 400:
        raise SendingFailed(f"HTTP {response.status_code}: it redirects, which is not followed; give its final address")
    asked = response.headers.get("Retry-After", "")
    raise SendingFailed(
        _without_secrets(target, f"HTTP {response.status_code} {text}".strip()),
        float(asked) if asked.isdigit() else None,
    )


def _start_of(response: httpx.Response) -> str:
    for chunk in response.iter_bytes(_SHOWN_CHARACTERS):
        return " ".join(chunk.decode(errors="replace").split())
    return ""


def _without_secrets(target: NotificationTarget, text: str) -> str:
    address = target.url.get_secret_value()
    secrets = [address, httpx.URL(address).raw_path.decode()]
    if target.token is not None:
        secrets.append(target.token.get_secret_value())
    for secret in secrets:
        if len(secret) > 1:
            text = text.replace(secret, "…")
    return text
