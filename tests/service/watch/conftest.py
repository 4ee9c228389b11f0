"""A run whose steps the test closes itself."""

from __future__ import annotations

import pytest

from foreshock_service.platform.database.session import Database
from tests.service.watch.recorded import RecordedRun


@pytest.fixture
def recorded(database: Database) -> RecordedRun:
    """A new run on both databases."""
    return RecordedRun(database).begin()
