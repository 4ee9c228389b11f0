"""A run whose step waits to be probed."""

import httpx
import pytest

from tests.service.sending import Sender
from tests.service.working import STEP, run_to_probe


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with one closed step of 12 rollouts and its checkpoint."""
    return run_to_probe(http, STEP)
