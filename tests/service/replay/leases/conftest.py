"""A clock of leases, scores and probes that the test moves, so that no test waits."""

import pytest
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.replay import leases
from foreshock_service.replay.probes import service as probes
from foreshock_service.replay.results import publishing


class Clock:
    """The database's time."""

    def __init__(self) -> None:
        self.now = now_us()

    def read(self, _: Session) -> int:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += int(seconds * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (leases, publishing, probes):
        monkeypatch.setattr(module, "database_now_us", clock.read)
    return clock
