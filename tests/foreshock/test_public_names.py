"""The public names of the package, the cost of importing it, and the clock."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import foreshock
from foreshock import clock


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
