"""The bodies of notifications (generic JSON, Slack, Alertmanager's `POST /api/v2/alerts`), and how they are sent."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from foreshock import errors, ranges
from foreshock.clock import now_us
from foreshock.severity import Severity
from foreshock_service.platform.database.tables import new_identifier
from foreshock_service.platform.settings import NotificationTarget, load_settings

ALERTMANAGER_SECONDS = 300
"""Time after which Alertmanager takes an alert for resolved unless it is sent again, as Prometheus does."""


@dataclass(frozen=True, slots=True)
class Message:
    """An alert that was opened or resolved, and its run; `page` is the address of the run's page."""

    id: str
    change: str
    alert_id: str
    rule: str
    severity: Severity
    state: str
    attempt: int
    step: int
    cleared_step: int | None
    value: float
    threshold: float
    why: str
    what_to_do: str
    opened_at_us: int
    changed_at_us: int
    run_id: str
    run_key: str
    project: str
    page: str
    verdict: ranges.Verdict
    headline: str
    """of the run's diagnosis when the message is sent"""


@dataclass(frozen=True, slots=True)
class VerdictMessage:
    """The verdict of a run that changed, with the headline of its diagnosis."""

    id: str
    run_id: str
    run_key: str
    project: str
    page: str
    verdict: ranges.Verdict
    headline: str


def address_and_body(target: NotificationTarget, message: Message | VerdictMessage, now_us: int) -> tuple[str, Any]:
    """Return where to POST what."""
    address = target.url.get_secret_value()
    if isinstance(message, VerdictMessage):
        return address, _of_verdict(target, message)
    if target.kind == "slack":
        return address, {"text": _slack_text(message)}
    if target.kind == "alertmanager":
        return f"{address.rstrip('/')}/api/v2/alerts", [_alertmanager_alert(message, now_us)]
    return address, _json_body(message)


def _json_body(message: Message) -> dict[str, Any]:
    alert = (
        "rule", "severity", "state", "attempt", "step", "cleared_step", "value", "threshold", "why", "what_to_do",
        "opened_at_us", "changed_at_us",
    )  # fmt: skip
    return {
        "version": 1,
        "id": message.id,
        "change": message.change,
        "alert": {"id": message.alert_id, **{name: getattr(message, name) for name in alert}},
        "run": {"id": message.run_id, "key": message.run_key, "project": message.project, "page": message.page},
        "diagnosis": {"verdict": message.verdict, "headline": message.headline},
    }


def _of_verdict(target: NotificationTarget, message: VerdictMessage) -> dict[str, Any]:
    if target.kind == "slack":
        run = f"<{message.page}|{_escaped(message.run_key)}>"
        return {"text": f"*{message.verdict}*: {run}\n{_escaped(message.headline)}"}
    return {
        "version": 1,
        "id": message.id,
        "change": "verdict",
        "run": {"id": message.run_id, "key": message.run_key, "project": message.project, "page": message.page},
        "diagnosis": {"verdict": message.verdict, "headline": message.headline},
    }


def _slack_text(message: Message) -> str:
    head = f"*{message.severity}*" if message.change == "opened" else "*resolved*"
    run = f"<{message.page}|{_escaped(message.run_key)}>"
    text = f"{head}: {_escaped(message.rule)} at step {message.step} of {run}\n{_escaped(message.headline)}"
    if message.change == "opened":
        text += f"\n{_escaped(message.why)}\n_{_escaped(message.what_to_do)}_"
    return text


def _alertmanager_alert(message: Message, now_us: int) -> dict[str, Any]:
    ends_at_us = now_us + ALERTMANAGER_SECONDS * 1_000_000 if message.change == "opened" else now_us
    return {
        "labels": {
            "alertname": "Foreshock" + "".join(word.capitalize() for word in message.rule.split("_")),
            "severity": message.severity,
            "project": message.project,
            "run": message.run_id,
            "run_key": message.run_key,
            "alert": message.alert_id,
        },
        "annotations": {
            "summary": f"{message.rule} at step {message.step} of {message.run_key}",
            "description": message.why,
            "what_to_do": message.what_to_do,
            "diagnosis": message.headline,
        },
        "startsAt": _rfc3339(message.opened_at_us),
        "endsAt": _rfc3339(ends_at_us),
        "generatorURL": message.page,
    }


def _escaped(text: str) -> str:
    """Return text in which Slack finds no link and no mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _rfc3339(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat().replace("+00:00", "Z")


TIMEOUT_SECONDS = 10.0
_SHOWN_CHARACTERS = 200


class SendingFailed(Exception):
    """The target did not take the message; the text has no secret. `retry_after_seconds`: as the target asked."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def send(target: NotificationTarget, message: Message | VerdictMessage, now_us: int) -> None:
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
    # As it comes: 64 kB of an encoding that nobody asked for can be 64 MB.
    for chunk in response.iter_raw(_SHOWN_CHARACTERS):
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


def show_targets() -> None:
    """Print every target, without its address."""
    for target in load_settings().notifications:
        projects = ", ".join(target.projects) or "every project"
        print(f"{target.name}\t{target.kind}\t{target.severity}\t{projects}")


def send_test(name: str) -> None:
    """Send a message that says that it is a test. Raises ConfigurationError if it is not taken."""
    settings = load_settings()
    targets = {target.name: target for target in settings.notifications}
    if name not in targets:
        known = ", ".join(targets) or "none; set FORESHOCK_NOTIFICATIONS"
        raise errors.ConfigurationError(f"there is no target {name}; targets: {known}")
    now = now_us()
    message = Message(
        id=new_identifier("notification"), change="opened", alert_id=new_identifier("alert"), rule="test",
        severity=targets[name].severity, state="open", attempt=1, step=0, cleared_step=None, value=0.0, threshold=0.0,
        why="This is a test of the notifications of Foreshock.", what_to_do="Nothing is to be done.",
        opened_at_us=now, changed_at_us=now, run_id="run_test", run_key="test", project="default",
        page=f"{settings.page_root}/",
        verdict="warning",
        headline="Warning since step 0: a test of this target.",
    )  # fmt: skip
    try:
        send(targets[name], message, now)
    except SendingFailed as error:
        raise errors.ConfigurationError(f"target {name} did not take the message: {error}") from None
    print(f"{name} took the message")
