"""Fixtures of the probes' tests: tiny checkpoints, and a real service in a process of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.recorded_runs import shipped_run
from benchmarks.running_service import forked_service
from tests.probes.held import HeldProcess, held
from tests.probes.tiny import save_checkpoint

LEASE_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that answers at `url`; a lease lasts `LEASE_SECONDS`."""

    url: str
    http: httpx.Client


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of weights with two checkpoints of one model: `first` and `second`."""
    root = tmp_path_factory.mktemp("weights")
    save_checkpoint(root / "first", seed=1)
    save_checkpoint(root / "second", seed=2)
    return root


@pytest.fixture(scope="session")
def recorder() -> Iterator[HeldProcess]:
    """A process in the environment that recorded the shipped run, or in the nearest that this CPU can be held to."""
    with held(shipped_run().environment.nearest()) as process:
        yield process


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """`foreshock serve` on its embedded default, in a folder of its own."""
    settings = {"FORESHOCK_LEASE_SECONDS": str(LEASE_SECONDS), "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
                "FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}  # fmt: skip
    # No connection is kept: the server closes idle ones, and tests sleep for as long as that takes.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        forked_service(tmp_path_factory.mktemp("service"), **settings) as url,
        httpx.Client(base_url=url, timeout=120, limits=limits) as http,
    ):
        yield RunningService(url, http)
