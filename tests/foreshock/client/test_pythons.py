"""The client's tests on every Python of this machine that Foreshock supports, with the base requirements alone."""

import os
import subprocess
import tomllib

import pytest

from tests.paths import REPOSITORY
from tests.pythons import environment_of, found_pythons

FOLDER = "tests/foreshock/client"
FILES = [
    f"{FOLDER}/test_{name}.py"
    for name in (
        "client", "client_arguments", "client_lifetime", "connection", "sender", "settings", "spool",
    )
]  # fmt: skip


@pytest.mark.parametrize("version", found_pythons())
def test_client_on_each_python(version: str) -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        str(environment_of(version)), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", FOLDER, *FILES,
        # One of the commands, whose entry points are not installed.
        "-k", "not no_header_can_carry",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_declared_pythons_are_supported() -> None:
    classifiers = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["classifiers"]
    declared = {each.rpartition(" ")[2] for each in classifiers if "Python :: 3." in each}
    assert declared >= {version.rpartition(".")[0] for version in found_pythons()}
