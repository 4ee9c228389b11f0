"""The package: its public names, the cost of importing it, the clock, and the command that installs an extra."""

import importlib.metadata
import json
import subprocess
import sys
import time
from typing import Any

import pytest

import foreshock
from foreshock import clock
from foreshock.installing import install_command, requirement


def test_clock_counts_microseconds() -> None:
    assert abs(clock.now_us() - time.time() * 1e6) < 5e6


def test_import_of_foreshock_imports_no_dependency() -> None:
    heavy = "numpy pyarrow httpx torch fastapi sqlalchemy"
    code = f"import sys, foreshock; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_are_imported_on_first_use() -> None:
    assert foreshock.RolloutBatch.__name__ == "RolloutBatch"
    assert set(foreshock.__all__) <= set(dir(foreshock))
    with pytest.raises(AttributeError, match="no attribute 'Rollouts'"):
        _ = foreshock.Rollouts


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "'foreshock[service]'"),
        ({"url": "file:///home/me/foreshock", "dir_info": {"editable": True}}, "-e '/home/me/foreshock[service]'"),
        ({"url": "file:///home/me/fore%20shock", "dir_info": {}}, "'/home/me/fore shock[service]'"),
        (
            {"url": "file:///tmp/foreshock-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'foreshock[service] @ file:///tmp/foreshock-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host.example/f.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'foreshock[service] @ git+https://host.example/f.git@abc'",
        ),
    ],
)
def test_extra_comes_from_where_the_package_came_from(origin: dict[str, Any] | None, expected: str) -> None:
    assert requirement("service", None if origin is None else json.dumps(origin)) == expected


def test_command_is_of_this_installation() -> None:
    origin = importlib.metadata.distribution("foreshock").read_text("direct_url.json")
    assert install_command("wandb") == f"pip install {requirement('wandb', origin)}"
