"""A trainer as a process of its own: a text of Python that a row runs, with the client and nothing of the service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def run_trainer(program: str, *arguments: str | Path, python: str = sys.executable, seconds: float = 300.0) -> Any:
    """Run a program and return the JSON of the last line that it prints, None if it prints nothing.

    Raises RuntimeError with the end of its errors if it fails.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [python, "-c", textwrap.dedent(program), *map(str, arguments)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None
