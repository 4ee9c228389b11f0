"""Clients of the real service that export."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreshock import Client
from tests.foreshock.client.trainer import clients
from tests.foreshock.running_service import RunningService


@pytest.fixture
def make(shared_service: RunningService, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    with clients(shared_service.url, tmp_path / "spool", attempt_key="a", strict=True) as make_client:
        yield make_client
