"""Fixtures: the database beside the running service, and `foreshock remeasure` on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from foreshock_service.maintenance.remeasure import Request, remeasure
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings


@pytest.fixture
def beside(settings: Settings) -> Iterator[Database]:
    """The service's database, as a second process sees it."""
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture
def command(settings: Settings, decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> Callable[[Request], int]:
    """A call of `foreshock remeasure` on the service's own data; returns its exit status."""
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    return lambda request: remeasure(request, decoders)
