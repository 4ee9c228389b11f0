"""Send a notification: a text through Apprise, or an alert to Alertmanager's `POST /api/v2/alerts`."""

import json
import logging
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx

from foreshock import clock, errors
from foreshock.api.diagnosis import Diagnosis
from foreshock_service.platform.database.tables import Alert, Run, new_identifier
from foreshock_service.platform.settings import NotificationTarget, load_settings
from foreshock_service.runs.diagnoses import NOTHING_YET

if TYPE_CHECKING:
    from apprise import AppriseAsset

ALERTMANAGER_SECONDS = 300
"""Time after which Alertmanager regards an alert as resolved unless it is sent again; Prometheus sends alerts again."""


@dataclass(frozen=True, slots=True)
class Message:
    """An alert that was opened or resolved, or (`alert` None) a run's verdict that changed.

    `page` is the address of the run's page; `said` is its diagnosis when this is sent.
    """

    change: str
    alert: Alert | None
    run: Run
    page: str
    said: Diagnosis

    @property
    def to_do(self) -> str:
        """The first thing to do by the diagnosis, else by the alert, which knows of no other one."""
        own = "" if self.alert is None else self.alert.what_to_do
        return next(iter(self.said.next_steps), own)


TIMEOUT_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
_SHORTEST_SECRET = 5


class SendingFailed(Exception):
    """The target did not accept the message; the text holds no secret."""


def send(target: NotificationTarget, message: Message, now_us: int) -> None:
    """Send the message. Raises SendingFailed unless the target accepts it."""
    if not target.is_alertmanager:
        _send_text(target, message)
    elif message.alert is not None:
        _post(target, [_alertmanager_alert(message, message.alert, now_us)])


def check_targets(targets: Sequence[NotificationTarget]) -> None:
    """Raise ConfigurationError for a target whose URL Apprise does not know."""
    for target in targets:
        if not target.is_alertmanager:
            _service_of(target)


def _send_text(target: NotificationTarget, message: Message) -> None:
    from apprise import Apprise, NotifyFormat

    title, text, kind = _text_of(message)
    service = Apprise(asset=_asset())
    service.add(_service_of(target))
    warnings: list[str] = []
    _warnings.set(warnings)
    if not service.notify(body=text, title=title, notify_type=kind, body_format=NotifyFormat.TEXT):
        said = warnings[-1] if warnings else "Apprise could not send the message"
        raise SendingFailed(_without_secrets(target, said))


def _service_of(target: NotificationTarget) -> Any:
    """Return the target as an object of Apprise. Raises ConfigurationError if Apprise does not know its URL."""
    asset = _asset()
    from apprise import Apprise

    service = Apprise.instantiate(target.url.get_secret_value(), asset=asset, suppress_exceptions=True)
    if service is None:
        raise errors.ConfigurationError(
            f"FORESHOCK_NOTIFICATIONS: target {target.name}: its url is not one of Apprise, which lists them at "
            "https://appriseit.com/services/, nor alertmanager://HOST:PORT"
        )
    # A redirect could lead into this network. `redirect=yes` in the URL changes nothing.
    service.redirects = False
    service.socket_connect_timeout = service.socket_read_timeout = TIMEOUT_SECONDS
    return service


@cache
def _asset() -> "AppriseAsset":
    # Imported at the first use: it takes a second, and most services have no target.
    from apprise import AppriseAsset

    # urllib3 logs addresses, which hold secrets. The warnings of Apprise become the text of SendingFailed.
    for name, handler in (("apprise", _Warnings()), ("urllib3", logging.NullHandler())):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    return AppriseAsset(
        app_id="Foreshock", app_desc="Foreshock", app_url="", image_url_mask="", http_redirects=False, async_mode=False
    )


class _Warnings(logging.Handler):
    """Keep the warnings of the message that is being sent: Apprise passes the context to its threads."""

    def emit(self, record: logging.LogRecord) -> None:
        _warnings.get([]).append(record.getMessage())


_warnings: ContextVar[list[str]] = ContextVar("warnings")


def _text_of(message: Message) -> tuple[str, str, str]:
    """Return title, text and Apprise's type of a message."""
    alert, key = message.alert, message.run.key
    types = {"critical": "failure", "warning": "warning", "info": "info"}
    if alert is None:
        verdict = message.said.verdict
        return f"{verdict}: {key}", f"{message.said.headline}\n{message.page}", types.get(verdict, "success")
    where = f"{alert.rule} at step {alert.step} of {key}"
    if message.change == "resolved":
        return f"resolved: {where}", f"{message.said.headline}\n{message.page}", "success"
    lines = (message.said.headline, alert.why, message.to_do, message.page)
    return f"{alert.severity}: {where}", "\n".join(lines), types[alert.severity]


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
            "what_to_do": message.to_do,
            "diagnosis": message.said.headline,
        },
        "startsAt": _rfc3339(alert.opened_at_us),
        "endsAt": _rfc3339(ends_at_us),
        "generatorURL": message.page,
    }


def _rfc3339(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat().replace("+00:00", "Z")


def _post(target: NotificationTarget, body: Any) -> None:
    """POST alerts to an Alertmanager. Raises SendingFailed unless the answer is 2xx."""
    headers = {"User-Agent": "foreshock", "Content-Type": "application/json"}
    if target.token is not None:
        headers["Authorization"] = f"Bearer {target.token.get_secret_value()}"
    address, timeout = f"{target.address}/api/v2/alerts", httpx.Timeout(TIMEOUT_SECONDS).as_dict()
    try:
        request = httpx.Request(
            "POST", address, headers=headers, content=json.dumps(body).encode(), extensions={"timeout": timeout}
        )
        # Not httpx.Client: it logs addresses, which may hold a secret, and may follow redirects.
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
    raise SendingFailed(_without_secrets(target, f"HTTP {response.status_code} {text}".strip()))


def _start_of(response: httpx.Response) -> str:
    # Raw, not decoded: 64 kB with an encoding that was not requested may expand to 64 MB.
    for chunk in response.iter_raw(_SHOWN_CHARACTERS):
        return " ".join(chunk.decode(errors="replace").split())
    return ""


def _without_secrets(target: NotificationTarget, text: str) -> str:
    """Replace the parts of the target's URL: any of them may be a secret, such as a token in the place of the host."""
    parts = re.split(r"[/?&=@:+#]+", target.url.get_secret_value().partition("://")[2])
    if target.token is not None:
        parts.append(target.token.get_secret_value())
    for part in sorted({unquote(part) for part in parts} | set(parts), key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            text = text.replace(part, "…")
    return text


def show_targets() -> None:
    """Print every target, without its URL."""
    for target in load_settings().notifications:
        projects = ", ".join(target.projects) or "every project"
        print(f"{target.name}\t{target.severity}\t{projects}")


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
    headline = "Warning since step 0: a test of this target."
    said = replace(NOTHING_YET, next_steps=(), verdict="warning", headline=headline)
    message = Message("opened", alert, run, f"{settings.page_root}/", said)
    try:
        send(targets[name], message, now)
    except SendingFailed as error:
        raise errors.ConfigurationError(f"target {name} did not take the message: {error}") from None
    print(f"{name} took the message")
