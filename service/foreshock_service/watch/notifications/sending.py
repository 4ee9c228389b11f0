"""Build and send the bodies of notifications: generic JSON, Slack, Alertmanager's `POST /api/v2/alerts`."""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx

from foreshock import clock, errors
from foreshock.api.diagnosis import RunVerdict
from foreshock_service.platform.database.tables import Alert, Run, new_identifier
from foreshock_service.platform.settings import NotificationTarget, load_settings
from foreshock_service.runs.diagnoses import NOTHING_YET

ALERTMANAGER_SECONDS = 300
"""Time after which Alertmanager regards an alert as resolved unless it is sent again; Prometheus sends alerts again."""


@dataclass(frozen=True, slots=True)
class Message:
    """An alert that was opened or resolved, or (`alert` None) a run's verdict that changed.

    `page` is the address of the run's page; `said` has the verdict and headline of its diagnosis when this is sent.
    """

    id: str
    change: str
    alert: Alert | None
    run: Run
    page: str
    said: RunVerdict


def address_and_body(target: NotificationTarget, message: Message, now_us: int) -> tuple[str, Any]:
    """Return the address to POST to and the JSON body."""
    address = target.url.get_secret_value()
    if target.kind == "slack":
        return address, {"text": _slack_text(message)}
    if target.kind == "alertmanager" and message.alert is not None:
        return f"{address.rstrip('/')}/api/v2/alerts", [_alertmanager_alert(message, message.alert, now_us)]
    return address, _json_body(message)


def _json_body(message: Message) -> dict[str, Any]:
    names = (
        "id", "rule", "severity", "state", "attempt", "step", "cleared_step", "value", "threshold", "why", "what_to_do",
        "opened_at_us", "changed_at_us",
    )  # fmt: skip
    alert = {} if message.alert is None else {"alert": {name: getattr(message.alert, name) for name in names}}
    run = message.run
    return {
        "version": 1,
        "id": message.id,
        "change": message.change,
        **alert,
        "run": {"id": run.id, "key": run.key, "project": run.project, "page": message.page},
        "diagnosis": {"verdict": message.said.verdict, "headline": message.said.headline},
    }


def _slack_text(message: Message) -> str:
    alert, run = message.alert, f"<{message.page}|{_escaped(message.run.key)}>"
    headline = _escaped(message.said.headline)
    if alert is None:
        return f"*{message.said.verdict}*: {run}\n{headline}"
    head = f"*{alert.severity}*" if message.change == "opened" else "*resolved*"
    text = f"{head}: {_escaped(alert.rule)} at step {alert.step} of {run}\n{headline}"
    if message.change == "opened":
        text += f"\n{_escaped(alert.why)}\n_{_escaped(alert.what_to_do)}_"
    return text


def _alertmanager_alert(message: Message, alert: Alert, now_us: int) -> dict[str, Any]:
    ends_at_us = now_us + ALERTMANAGER_SECONDS * 1_000_000 if message.change == "opened" else now_us
    return {
        "labels": {
            "alertname": "Foreshock" + "".join(word.capitalize() for word in alert.rule.split("_")),
            "severity": alert.severity,
            "project": message.run.project,
            "run": message.run.id,
            "run_key": message.run.key,
            "alert": alert.id,
        },
        "annotations": {
            "summary": f"{alert.rule} at step {alert.step} of {message.run.key}",
            "description": alert.why,
            "what_to_do": alert.what_to_do,
            "diagnosis": message.said.headline,
        },
        "startsAt": _rfc3339(alert.opened_at_us),
        "endsAt": _rfc3339(ends_at_us),
        "generatorURL": message.page,
    }


def _escaped(text: str) -> str:
    """Escape text so that Slack finds no link and no mention in it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _rfc3339(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat().replace("+00:00", "Z")


TIMEOUT_SECONDS = 10.0
_SHOWN_CHARACTERS = 200


class SendingFailed(Exception):
    """The target did not accept the message; the text holds no secret. `retry_after_seconds` is the target's."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def send(target: NotificationTarget, message: Message, now_us: int) -> None:
    """POST the message. Raises SendingFailed unless the answer is 2xx."""
    address, body = address_and_body(target, message, now_us)
    # A retry has the same key, so that a receiver can recognize it.
    headers = {"User-Agent": "foreshock", "Content-Type": "application/json", "Idempotency-Key": message.id}
    if target.token is not None:
        headers["Authorization"] = f"Bearer {target.token.get_secret_value()}"
    timeout = httpx.Timeout(TIMEOUT_SECONDS).as_dict()
    try:
        request = httpx.Request(
            "POST", address, headers=headers, content=json.dumps(body).encode(), extensions={"timeout": timeout}
        )
        # Not httpx.Client: it logs addresses, which hold Slack's token, and may follow redirects.
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
    # Raw, not decoded: 64 kB with an encoding that was not requested may expand to 64 MB.
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
    """Send a test message. Raises ConfigurationError if it is not accepted."""
    settings = load_settings()
    targets = {target.name: target for target in settings.notifications}
    if name not in targets:
        known = ", ".join(targets) or "none; set FORESHOCK_NOTIFICATIONS"
        raise errors.ConfigurationError(f"there is no target {name}; targets: {known}")
    now = clock.now_us()
    alert = Alert(
        id=new_identifier("alert"), rule="test", severity=targets[name].severity, state="open", attempt=1, step=0,
        cleared_step=None, value=0.0, threshold=0.0, why="This is a test of the notifications of Foreshock.",
        what_to_do="Nothing is to be done.", opened_at_us=now, changed_at_us=now,
    )  # fmt: skip
    run = Run(id="run_test", key="test", project="default")
    said = replace(NOTHING_YET.summary, verdict="warning", headline="Warning since step 0: a test of this target.")
    message = Message(new_identifier("notification"), "opened", alert, run, f"{settings.page_root}/", said)
    try:
        send(targets[name], message, now)
    except SendingFailed as error:
        raise errors.ConfigurationError(f"target {name} did not take the message: {error}") from None
    print(f"{name} took the message")
