"""Prometheus's own programs. Tests are skipped with a hint if they are not installed; in CI that is an error."""

from __future__ import annotations

import os
import shutil

import pytest


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed: apt-get install prometheus"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool."""
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    """The path of the Prometheus server."""
    return _program("prometheus")
