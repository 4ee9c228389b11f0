"""Fixtures of the tests of maintenance."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from foreshock_service.platform.context import ServiceContext


@pytest.fixture
def context(app: FastAPI) -> ServiceContext:
    """The parts of the running application."""
    found: ServiceContext = app.state.context
    return found
