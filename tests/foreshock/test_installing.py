"""The command that installs an extra names the place from which Foreshock was installed."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

from foreshock.installing import install_command, requirement


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
