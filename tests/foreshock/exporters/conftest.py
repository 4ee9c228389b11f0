"""Clients of the real service that export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foreshock import Client
from tests.foreshock.running_service import RunningService


@pytest.fixture
def make(shared_service: RunningService, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make_client(run_key: str, **options: Any) -> Client:
        settings: dict[str, Any] = {"spool_directory": tmp_path / "spool", "attempt_key": "a", "strict": True} | options
        made.append(Client(shared_service.url, run_key=run_key, **settings))
        return made[-1]

    yield make_client
    for client in made:
        client.close(0.5)
