"""The real service for tests of what talks to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.foreshock.running_service import RunningService, running_service


@pytest.fixture(scope="module")
def real_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """`foreshock serve`, one for the tests of a module, which use runs of their own."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service
