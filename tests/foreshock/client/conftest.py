"""Fixtures: a faulty service, and clients that are closed after each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreshock.client import Client, sender
from tests.foreshock.client.faulty_service import FaultyService, faulty_service
from tests.foreshock.client.trainer import clients


@pytest.fixture
def service() -> Iterator[FaultyService]:
    with faulty_service() as running:
        yield running


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_AWAY_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(sender, "_REFUSED_SECONDS", (0.05, 0.2))


@pytest.fixture
def make(tmp_path: Path, service: FaultyService) -> Iterator[Callable[..., Client]]:
    with clients(service.url, tmp_path / "spool", timeout_seconds=5.0) as make_client:
        yield make_client
