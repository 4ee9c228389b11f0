"""The wheel installs and works in clean environments: the base one of a trainer, and the one of the service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.paths import REPOSITORY
from tests.ports import free_port

pytestmark = pytest.mark.slow


def run(*command: str | Path, **environment: str) -> str:
    outcome = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=environment.get("PWD"),
        check=False,
    )
    assert outcome.returncode == 0, f"{command}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because a build leaves files in its folder.
    for package in (
        "foreshock",
        "foreshock_service",
        "foreshock_probes",
        "migrations",
        "benchmarks",
        "dashboards",
        "examples",
        "scripts",
    ):
        ignored = shutil.ignore_patterns("__pycache__", "recorded", "results")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, folder / file)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def new_environment(folder: Path) -> Path:
    venv.create(folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def base_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with only the wheel and its dependencies."""
    binaries = new_environment(tmp_path_factory.mktemp("base"))
    install(binaries, str(wheel))
    return binaries


def install(binaries: Path, requirement: str) -> None:
    constraints = REPOSITORY / "constraints.txt"
    # Most modules are never imported here; compiling them would take longer than the test.
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "-q", "--no-compile")
    run(*pip, "-c", constraints, requirement)


def test_wheel_holds_the_three_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "foreshock",
        "foreshock_service",
        "foreshock_probes",
    }


def test_base_install_needs_three_dependencies_and_imports_no_service_or_probes(
    base_environment: Path, tmp_path: Path
) -> None:
    names = run(
        base_environment / "python",
        "-c",
        "import sys, foreshock; foreshock.Client, foreshock.AdviceFeed, foreshock.apply_scale;"
        "above = {'torch', 'fastapi', 'sqlalchemy', 'pydantic', 'foreshock_service', 'foreshock_probes'};"
        "print(sorted({name.split('.')[0] for name in sys.modules} & above))",
        PWD=str(tmp_path),
    )
    assert names.strip() == "[]"
    assert "report" in run(base_environment / "foreshock", "--help", PWD=str(tmp_path))


def test_command_without_its_extra_names_the_extra(base_environment: Path, tmp_path: Path) -> None:
    outcome = subprocess.run(
        [base_environment / "foreshock", "serve"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert outcome.returncode == 2
    assert "foreshock[service]" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.timeout(1500)
def test_serve_starts_from_the_wheel_with_its_extra(wheel: Path, tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "clean")
    install(environment, f"{wheel}[service]")
    port = free_port()
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [environment / "foreshock", "serve", "--port", str(port)], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        assert wait_until_ready(f"http://127.0.0.1:{port}/readyz", server), (tmp_path / "serve.log").read_text()
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/openapi.json", timeout=60).json()["info"]["title"]
    finally:
        server.terminate()
        server.wait(timeout=120)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], seconds: float = 600) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    return False
