"""A process ends itself at the kill point that it is armed with, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from benchmarks.faults.kill_points import KILL_POINTS, found
from tests.paths import REPOSITORY

_CODE = """
import sys
from foreshock_service.platform.store import tokens
from benchmarks.faults import kill_points
tokens._sync = lambda path: None
kill_points.arm(sys.argv[1])
for _ in range(3):
    tokens._sync(None)
    print("called", flush=True)
"""


def _run(armed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _CODE, armed], cwd=REPOSITORY, capture_output=True, text=True)


def test_process_is_killed_after_the_given_call_of_the_named_function() -> None:
    done = _run("store.file-synced:2")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "called\n")


def test_nothing_happens_without_a_point() -> None:
    assert _run("").stdout == "called\n" * 3


@pytest.mark.parametrize("name", KILL_POINTS)
def test_function_of_each_point_exists(name: str) -> None:
    owner, attribute = found(KILL_POINTS[name])
    assert callable(getattr(owner, attribute))


_STATEMENTS = """
from sqlalchemy import create_engine, text
from foreshock_service.watch.advance import Advancing
from benchmarks.faults import kill_points
connection = create_engine("sqlite://").connect()
Advancing.advance = lambda: [print(connection.scalar(text(f"SELECT {n}")), flush=True) for n in (1, 2, 3)]
kill_points.arm("advance.statement:5")
connection.execute(text("SELECT 0"))
Advancing.advance()
Advancing.advance()
"""


def test_process_is_killed_before_the_given_statement_of_the_named_function() -> None:
    done = subprocess.run([sys.executable, "-c", _STATEMENTS], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "1\n2\n3\n1\n")
