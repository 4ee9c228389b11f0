"""A real Alertmanager takes the alerts, groups them as one, and ends them."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from foreshock_service.platform.database.tables import Notification
from foreshock_service.platform.settings import NotificationTarget
from tests.monitoring import running_alertmanager
from tests.service.watch.notifications.conftest import Alerting
from tests.service.watch.notifications.receiver import Receiver
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def alertmanager(receiver: Receiver, tmp_path: Path) -> Iterator[str]:
    """An Alertmanager of this test's own, whose receiver is `receiver`."""
    configuration = (
        "route: {receiver: hook, group_wait: 100ms, group_interval: 1s, repeat_interval: 1h}\n"
        f"receivers: [{{name: hook, webhook_configs: [{{url: '{receiver.url}/from-alertmanager'}}]}}]\n"
    )
    with running_alertmanager(configuration, tmp_path) as url:
        yield url


def test_alertmanager_gets_keeps_and_ends_the_alert(alerting: Alerting, alertmanager: str, receiver: Receiver) -> None:
    target = NotificationTarget.model_validate(
        {"name": "am", "url": f"alertmanager{alertmanager.removeprefix('http')}/"}
    )
    alert = alerting.open()
    alerting.notify(target)
    (held,) = httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json()
    assert held["labels"] == {
        "alertname": "ForeshockClientLosses", "severity": "warning", "project": "team-a",
        "run": alerting.sender.run, "run_key": "my run", "alert": alert,
    }  # fmt: skip
    assert held["status"]["state"] in ("active", "unprocessed")
    assert held["generatorURL"] == f"{alerting.context.settings.page_root}/runs/team-a/my%20run"
    wait_until(lambda: receiver.requests, 240)
    first_end = held["endsAt"]
    time.sleep(1.1)
    alerting.context.database.write(lambda session: session.execute(update(Notification).values(due_at_us=0)))
    alerting.notify(target)
    (again,) = httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json()
    assert again["endsAt"] > first_end, "an alert that is still open is sent again before Alertmanager ends it"
    alerting.change(alert, "resolve")
    alerting.notify(target)
    wait_until(lambda: any(body["status"] == "resolved" for body in receiver.bodies), 240)
    assert [body["status"] for body in receiver.bodies] == ["firing", "resolved"], "one message per change"
    assert httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json() == []
    alerting.context.database.write(lambda session: session.execute(update(Notification).values(due_at_us=0)))
    alerting.notify(target)
    assert httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json() == [], "it does not come back"
