"""What TRL's and verl's trainers give to the hooks, changed: logged rightly, or refused with a sentence."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_no_change_is_silent_or_wrong() -> None:
    """verl's classes stay observed, so the benchmark runs in a process of its own."""
    output = _measured("mutations")
    assert "mutations_silent=0 mutations_wrong=0 reached=true" in output
    for logged in ("TRL's GMPOTrainer", "class of another name", "derived class with a tool mask",
                   "_generate returns a list", "derived class with a fit of its own", "a fit that is a coroutine",
                   "a loop that is not called fit"):  # fmt: skip
        assert f"logged   {logged}" in output


def test_no_bad_column_is_silent_or_unsaid_on_the_page() -> None:
    """Another length, NaN, another dtype in each column of TRL, verl, slime and a `Connection`."""
    assert "columns_silent=0 columns_unsaid=0 columns_wrong=0 reached=true" in _measured("bad_columns")


def _measured(part: str) -> str:
    command = [sys.executable, "-m", "benchmarks.connect", part]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
