"""Prometheus's own checker."""

from __future__ import annotations

import pytest

from tests import monitoring


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool."""
    return monitoring.promtool()
