"""Actions of `foreshock notify`, on the targets that the settings name."""

from __future__ import annotations

from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from foreshock_service.platform.identifiers import new_identifier
from foreshock_service.platform.settings import load_settings
from foreshock_service.watch.notifications.messages import Message
from foreshock_service.watch.notifications.sending import SendingFailed, send


def show() -> None:
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
        raise ConfigurationError(f"there is no target {name}; targets: {known}")
    now = now_us()
    message = Message(
        id=new_identifier("notification"), change="opened", alert_id=new_identifier("alert"), rule="test",
        severity=targets[name].severity, state="open", attempt=1, step=0, cleared_step=None, value=0.0, threshold=0.0,
        why="This is a test of the notifications of Foreshock.", what_to_do="Nothing is to be done.",
        opened_at_us=now, changed_at_us=now, run_id="run_test", run_key="test", project="default",
        page=f"{settings.page_root}/",
    )  # fmt: skip
    try:
        send(targets[name], message, now)
    except SendingFailed as error:
        raise ConfigurationError(f"target {name} did not take the message: {error}") from None
    print(f"{name} took the message")
