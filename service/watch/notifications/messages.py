"""The bodies of notifications: generic JSON, Slack, and Alertmanager's `POST /api/v2/alerts`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from foreshock.severity import Severity
from foreshock_service.platform.notification_targets import NotificationTarget

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


def address_and_body(target: NotificationTarget, message: Message, now_us: int) -> tuple[str, Any]:
    """Return where to POST what."""
    address = target.url.get_secret_value()
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
    }


def _slack_text(message: Message) -> str:
    head = f"*{message.severity}*" if message.change == "opened" else "*resolved*"
    run = f"<{message.page}|{_escaped(message.run_key)}>"
    text = f"{head}: {_escaped(message.rule)} at step {message.step} of {run}"
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
