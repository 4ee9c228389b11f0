"""Fixtures: the database beside the running service, and `foreshock remeasure` on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.database.session import Database
from service.settings import Settings


@pytest.fixture
def beside(settings: Settings) -> Iterator[Database]:
    """The service's database, as a second process sees it."""
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture
def operator(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The environment of an operator whose commands work on the service's own data."""
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    monkeypatch.setenv("FORESHOCK_DECODE_PROCESSES", "1")
    monkeypatch.setenv("FORESHOCK_TOKEN_PASS", "numpy")
    return settings
