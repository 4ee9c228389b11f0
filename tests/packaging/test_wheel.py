"""The wheel installs and works in clean environments: the base one of a trainer, and the one of the service."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]

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
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, REPOSITORY)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def clean_environment(tmp_path: Path) -> Path:
    folder = tmp_path / "clean"
    venv.create(folder, with_pip=True)
    return folder / "bin"


def install(binaries: Path, requirement: str) -> None:
    constraints = REPOSITORY / "constraints.txt"
    run(binaries / "python", "-m", "pip", "install", "-q", "-c", constraints, requirement)


def test_the_base_install_imports_with_three_dependencies_and_without_the_layers_above(
    wheel: Path, clean_environment: Path, tmp_path: Path
) -> None:
    install(clean_environment, str(wheel))
    names = run(
        clean_environment / "python",
        "-c",
        "import sys, foreshock; foreshock.Client, foreshock.AdviceFeed, foreshock.apply_scale;"
        "above = {'torch', 'fastapi', 'sqlalchemy', 'pydantic', 'service', 'probes'};"
        "print(sorted({name.split('.')[0] for name in sys.modules} & above))",
        PWD=str(tmp_path),
    )
    assert names.strip() == "[]"
    assert "report" in run(clean_environment / "foreshock", "--help", PWD=str(tmp_path))


def test_a_command_whose_extra_is_missing_says_which_to_install(
    wheel: Path, clean_environment: Path, tmp_path: Path
) -> None:
    install(clean_environment, str(wheel))
    outcome = subprocess.run(
        [clean_environment / "foreshock", "serve"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert outcome.returncode == 2
    assert "foreshock[service]" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_serve_starts_from_the_wheel_with_its_extra(wheel: Path, clean_environment: Path, tmp_path: Path) -> None:
    install(clean_environment, f"{wheel}[service]")
    port = free_port()
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [clean_environment / "foreshock", "serve", "--port", str(port)], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        assert wait_until_ready(f"http://127.0.0.1:{port}/readyz", server), (tmp_path / "serve.log").read_text()
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/openapi.json", timeout=60).json()["info"]["title"]
    finally:
        server.terminate()
        server.wait(timeout=120)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], seconds: float = 240) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    return False
