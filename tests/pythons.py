"""The Pythons of this machine that Foreshock supports, each with what a trainer needs and pytest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.paths import REPOSITORY

_MINORS = range(11, 15)
_OF_TESTS = ("pytest", "pytest-timeout", "hypothesis")


def found_pythons() -> dict[str, Path]:
    """Return the interpreters of pyenv and of the path by version, such as "3.12.1", and the one that runs this."""
    interpreters = [Path(sys.executable), *(Path.home() / ".pyenv" / "versions").glob("3.*/bin/python")]
    interpreters += [Path(path) for minor in _MINORS if (path := shutil.which(f"python3.{minor}")) is not None]
    found: dict[str, Path] = {}
    for interpreter in interpreters:
        asked = subprocess.run([interpreter, "--version"], capture_output=True, text=True, check=False)
        version = re.fullmatch(r"Python (3\.(\d+)\.\d+)", asked.stdout.strip())
        if version is not None and int(version[2]) in _MINORS:
            found.setdefault(version[1], interpreter)
    return dict(sorted(found.items()))


def environment_of(version: str) -> Path:
    """Return the Python of an environment with the base requirements, made below `build` by its first use."""
    folder = REPOSITORY / "build" / "pythons" / version
    python, done = folder / "bin" / "python", folder / "done"
    requirements = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = "\n".join([*requirements, *_OF_TESTS])
    if not done.is_file() or done.read_text() != wanted:
        subprocess.run([found_pythons()[version], "-m", "venv", "--clear", folder], check=True)
        command: list[str | Path] = [
            python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            *wanted.splitlines(),
        ]
        subprocess.run(command, check=True, capture_output=True)
        done.write_text(wanted)
    return python
