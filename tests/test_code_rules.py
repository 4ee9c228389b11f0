"""Rules of the code: docstrings of modules, no path of one machine, targets of the README that exist."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PACKAGES = ("foreshock", "service", "probes")


def tracked_files(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *patterns],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout: the list of tracked files is unknown")
    return [REPOSITORY / name for name in listing.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(REPOSITORY))
        for path in tracked_files(*(f"{package}/*.py" for package in PACKAGES))
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_no_tracked_file_has_a_path_of_one_machine() -> None:
    pattern = re.compile(r"/(work|farm|root)/[.a-z]")
    leaks = [
        f"{path.relative_to(REPOSITORY)}: {match.group()}"
        for path in tracked_files("*.py", "*.md", "*.toml", "*.yml", "*.sh", "Makefile", "*.json", "*.html")
        if (match := pattern.search(path.read_text()))
    ]
    assert not leaks


def test_every_make_target_in_the_readme_exists() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"make ([a-z][a-z-]*)", readme):
        assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", makefile, re.MULTILINE), target
