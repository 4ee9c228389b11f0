"""Targets, a run with an alert, and a context in which the outbox is filled and emptied by hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.settings import NotificationTarget
from foreshock_service.watch.notifications.service import notify
from tests.service.sending import Sender, make_batch, start_run
from tests.service.watch.notifications.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@dataclass(frozen=True, slots=True)
class Alerting:
    """A run whose only alert is opened by `open` and resolved by `resolve`, and who hears of it."""

    sender: Sender
    context: ServiceContext
    receiver: Receiver

    def target(self, **fields: Any) -> NotificationTarget:
        """Return the target of the receiver; `fields` override."""
        own = {"name": "team", "url": f"json://{self.receiver.host}/hooks/secret-token"}
        return NotificationTarget(**own | fields)

    @property
    def titles(self) -> list[str]:
        return [body["title"] for body in self.receiver.bodies]

    def open(self) -> str:
        """Lose an item, so that an alert is opened; return its id."""
        self.sender.put_shard(1, make_batch()).raise_for_status()
        body = {"shard": None, "undelivered": 0, "rejected": 3, "dropped": 0, "invalid": 0, "reason": "a <reason>"}
        path = f"/v1/runs/{self.sender.run}/attempts/1/clients/a"
        self.sender.http.put(path, json=body).raise_for_status()
        (alert,) = self.sender.get("alerts").json()["items"]
        return str(alert["id"])

    def change(self, alert: str, action: str) -> None:
        self.sender.http.post(f"/v1/runs/{self.sender.run}/alerts/{alert}/{action}").raise_for_status()

    def notify(self, target: NotificationTarget) -> None:
        """Fill the outbox and send what is due."""
        notify(self.context, target)


@pytest.fixture
def alerting(http: httpx.Client, app: FastAPI, receiver: Receiver) -> Alerting:
    return Alerting(start_run(http, project="team-a", key="my run"), app.state.context, receiver)
