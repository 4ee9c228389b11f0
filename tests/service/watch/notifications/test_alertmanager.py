"""A real Alertmanager takes the alerts, groups them as one, and ends them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from service.platform.database.tables import Notification
from service.platform.notification_targets import NotificationTarget
from tests.ports import free_port
from tests.service.watch.notifications.conftest import Alerting
from tests.service.watch.notifications.receiver import Receiver

pytestmark = pytest.mark.slow


def program() -> str:
    found = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if found is None:
        message = "Alertmanager is not installed: apt-get install prometheus-alertmanager"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture
def alertmanager(receiver: Receiver, tmp_path: Path) -> Iterator[str]:
    """An Alertmanager of this test's own, whose receiver is `receiver`."""
    configuration = tmp_path / "alertmanager.yml"
    configuration.write_text(
        "route: {receiver: hook, group_wait: 100ms, group_interval: 1s, repeat_interval: 1h}\n"
        f"receivers: [{{name: hook, webhook_configs: [{{url: '{receiver.url}/from-alertmanager'}}]}}]\n"
    )
    url = f"http://127.0.0.1:{free_port()}"
    with (tmp_path / "alertmanager.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program(), f"--config.file={configuration}", f"--storage.path={tmp_path / 'data'}",
                f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address=",
            ],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_for(lambda: _is_ready(url))
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come in time")


def test_alertmanager_gets_the_alert_keeps_it_and_is_told_its_end(
    alerting: Alerting, alertmanager: str, receiver: Receiver
) -> None:
    target = NotificationTarget.model_validate({"name": "am", "kind": "alertmanager", "url": f"{alertmanager}/"})
    alert = alerting.open()
    alerting.notify(target)
    (held,) = httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json()
    assert held["labels"] == {
        "alertname": "ForeshockClientLosses", "severity": "warning", "project": "team-a",
        "run": alerting.sender.run, "run_key": "my run", "alert": alert,
    }  # fmt: skip
    assert held["status"]["state"] in ("active", "unprocessed")
    assert held["generatorURL"] == f"{alerting.context.settings.page_root}/runs/team-a/my%20run"
    wait_for(lambda: receiver.requests)
    first_end = held["endsAt"]
    time.sleep(1.1)
    alerting.context.database.write(lambda session: session.execute(update(Notification).values(due_at_us=0)))
    alerting.notify(target)
    (again,) = httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json()
    assert again["endsAt"] > first_end, "an alert that is still open is sent again before Alertmanager ends it"
    alerting.change(alert, "resolve")
    alerting.notify(target)
    wait_for(lambda: any(body["status"] == "resolved" for body in receiver.bodies))
    assert [body["status"] for body in receiver.bodies] == ["firing", "resolved"], "one message per change"
    assert httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json() == []
    alerting.context.database.write(lambda session: session.execute(update(Notification).values(due_at_us=0)))
    alerting.notify(target)
    assert httpx.get(f"{alertmanager}/api/v2/alerts", timeout=30).json() == [], "it does not come back"
