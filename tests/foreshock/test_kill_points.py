"""A process ends itself at the point that FORESHOCK_KILL_AT names, and nowhere else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

from foreshock.kill_points import KILL_POINTS, VARIABLE
from tests.paths import REPOSITORY

_CODE = """
from foreshock.kill_points import passed
for _ in range(3):
    passed("store.file-synced")
    passed("ingest.after-commit")
    print("passed", flush=True)
"""


def _run(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE} | {
        "PYTHONPATH": str(REPOSITORY)
    }
    if value is not None:
        environment[VARIABLE] = value
    return subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True)


def test_process_is_killed_at_the_given_pass_of_the_named_point() -> None:
    done = _run("ingest.after-commit:2")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "passed\n")


def test_nothing_happens_without_the_variable_and_for_a_name_that_does_not_exist() -> None:
    assert _run(None).stdout == "passed\n" * 3
    unknown = _run("ingest.nowhere:1")
    assert unknown.stdout == "passed\n" * 3
    assert "FORESHOCK_KILL_AT=ingest.nowhere:1 is ignored" in unknown.stderr


def test_every_named_point_is_passed_somewhere() -> None:
    sources = "".join(
        path.read_text() for part in ("foreshock", "service") for path in (REPOSITORY / part).rglob("*.py")
    )
    assert set(re.findall(r'\bpassed\("([^"]+)"\)', sources)) == set(KILL_POINTS)
