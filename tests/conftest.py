"""Settings of all tests: property tests use new examples locally and the same examples in CI.

With FORESHOCK_INSTRUCTION_SET (see CONTRIBUTING.md) all tests run as on a CPU that has no more than that.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from foreshock_probes.engines.environment import hold_this_process

# Before any test imports torch. Idle OpenMP threads sleep: by default they spin, which takes a third of the CPU time of
# torch's and vLLM's tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
hold_this_process()
# Tests start hundreds of Python processes: those that may not keep bytecode compile the project anew each time, a third
# of the CPU time of their imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What is imported, torch and all, is kept out of garbage collections: a full one would take a quarter of a second.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, among the objects that tests make."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take: those that start vLLM, those with other slow tests, the rest.

    Processes are given whole files (`--dist loadfile`); a long file that begins last is waited for by the other one.
    """

    def rank(item: pytest.Item) -> int:
        return 0 if item.get_closest_marker("vllm") else 1 if item.get_closest_marker("slow") else 2

    of_file: dict[Path, int] = {}
    for item in items:
        of_file[item.path] = min(rank(item), of_file.get(item.path, 2))
    items.sort(key=lambda item: of_file[item.path])


# No deadlines: the result must not depend on the load. In CI a property test that fails must fail again.
settings.register_profile("development", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "development")
