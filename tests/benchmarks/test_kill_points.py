"""A process ends itself at the kill point that it is armed with, and nowhere else."""

from __future__ import annotations

import pytest

from benchmarks.faults.kill_points import KILL_POINTS, found


@pytest.mark.parametrize("name", KILL_POINTS)
def test_function_of_each_point_exists(name: str) -> None:
    owner, attribute = found(KILL_POINTS[name])
    assert callable(getattr(owner, attribute))
