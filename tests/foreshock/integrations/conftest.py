"""A connection to the service that the frameworks' runs are logged to."""

from collections.abc import Iterator

import httpx
import pytest

from tests.foreshock.running_service import RunningService


@pytest.fixture(scope="module")
def http(shared_service: RunningService) -> Iterator[httpx.Client]:
    """A connection to the service."""
    with httpx.Client(base_url=shared_service.url, timeout=60) as client:
        yield client
