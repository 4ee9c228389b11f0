"""Run a command of the service in a process of its own, as an operator does."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.forking import run_forked
from tests.paths import PYTHONPATH


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """Return the environment of a service whose data is in `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    own = {
        "FORESHOCK_DATABASE_URL": f"sqlite:///{folder}/foreshock.db",
        "FORESHOCK_STORE_URL": f"{folder}/tokens",
        # Any free one: another test, such as the demo's, may have the usual port.
        "FORESHOCK_PORT": "0",
        # No service answers there.
        "FORESHOCK_URL": "http://127.0.0.1:9",
        "PYTHONPATH": PYTHONPATH,
        # The same numbers as those of the compiled pass, which takes seconds of CPU time to load.
        "FORESHOCK_TOKEN_PASS": "numpy",
        "FORESHOCK_DECODE_PROCESSES": "1",
    }
    return kept | own | settings


def foreshock(
    folder: Path, *words: str, before: Sequence[str] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `before` is a program that starts it, with its arguments."""
    if not before:
        return run_forked(words, environment(folder, **settings), folder)
    return subprocess.run(
        [*before, sys.executable, "-m", "foreshock.commands.main", *words], env=environment(folder, **settings),
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
