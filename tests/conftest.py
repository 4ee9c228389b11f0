"""Settings of all tests: property tests use new examples locally and the same examples in CI.

With FORESHOCK_INSTRUCTION_SET (see CONTRIBUTING.md) all tests run as on a CPU that has no more than that.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from foreshock_probes.engines.environment import hold_this_process
from tests.paths import CERTIFICATE, REPOSITORY
from tests.quick import is_quick, is_quick_file

# Before any test imports torch. Idle OpenMP threads sleep: by default they spin, which takes a third of the CPU time of
# torch's and vLLM's tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# vLLM would compile one function, which ranks tokens and no test reads, in each engine: 2 s of CPU time.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
hold_this_process()
# Every HTTP client reads the certificates that the machine trusts, 25 ms of CPU time in each of thousands of clients
# and of polls for a server that starts. Tests talk to servers of their own, without TLS; what does not takes the first.
os.environ.setdefault("MACHINES_SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE", ""))
os.environ["SSL_CERT_FILE"] = str(CERTIFICATE)
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


TOGETHER = (
    re.compile(r"tests/probes/(doctor/|exact_divergence/|(\w+/)?test_(vllm_(?!tensor)|replay|(?!ray)\w*worker))"),
    re.compile(r"tests/service/present/pages/"),
)
"""Files that one process runs: those with engines share a service and do not start several engines at a time; those of
the pages share a browser and services with many runs.
"""


def unit_of(nodeid: str) -> str:
    """Return what is given to a process at a time: a file, or the files that belong together."""
    together = (pattern.pattern for pattern in TOGETHER if pattern.match(nodeid))
    return next(together, nodeid.partition("::")[0])


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives processes whole files, and those that belong together to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Schedule the tests of several processes (`-n`)."""
    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`, which `make test` uses."""
    parser.addoption("--quick", action="store_true", help="leave out what only `make test-all` runs (tests/quick.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`, do not import a file without a quick test."""
    if config.getoption("--quick") and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return None if is_quick_file(collection_path.relative_to(REPOSITORY).as_posix()) else True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not quick if asked to, and order what is left by how long it takes.

    Files that belong together come first, then those that start vLLM, slow ones, the rest.

    A long unit that begins last is waited for by the other processes.
    """

    def rank(item: pytest.Item) -> int:
        if unit_of(item.nodeid) in {pattern.pattern for pattern in TOGETHER}:
            return 0
        return 1 if item.get_closest_marker("vllm") else 2 if item.get_closest_marker("slow") else 3

    if config.getoption("--quick"):
        left_out = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    of_file: dict[Path, int] = {}
    for item in items:
        of_file[item.path] = min(rank(item), of_file.get(item.path, 3))
    items.sort(key=lambda item: of_file[item.path])


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("full"):
        return False
    if not isinstance(item, pytest.Function):
        return True
    return is_quick(item.nodeid, item.fixturenames, item.callspec.params if hasattr(item, "callspec") else {})


# No deadlines: the result must not depend on the load. In CI a property test that fails must fail again.
settings.register_profile("development", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "development")
