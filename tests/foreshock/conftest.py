"""The real service for tests of what talks to it."""

from collections.abc import Iterator

import pytest

from tests.foreshock.running_service import RunningService, running_service


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """`foreshock serve` for modules whose tests only add runs: a start takes 3 s of CPU time."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def real_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """`foreshock serve`, one for the tests of a module, which may stop it or list all runs."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service
