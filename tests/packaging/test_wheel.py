"""The wheel installs and works in clean environments: the base one of a trainer, and the one of the service."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.paths import REPOSITORY
from tests.ports import free_port
from tests.waiting import wait_until_answered

pytestmark = pytest.mark.slow

# Without the sources, which would be imported instead of the wheel, and with the machine's certificates for the index.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SSL_CERT_FILE")}
if machines := os.environ.get("MACHINES_SSL_CERT_FILE"):
    ENVIRONMENT["SSL_CERT_FILE"] = machines


def run(*command: str | Path, **environment: str) -> str:
    outcome = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=ENVIRONMENT | environment,
        cwd=environment.get("PWD"), check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, f"{command}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because a build leaves files in its folder.
    for package in (
        "foreshock",
        "service",
        "probes",
        "migrations",
        "registry",
        "benchmarks",
        "dashboards",
        "examples",
        "scripts",
    ):
        # Recorded data of benchmarks and examples is large; `results` is a noun of the service, too.
        data = () if package in ("foreshock", "service", "probes") else ("recorded", "results")
        ignored = shutil.ignore_patterns("__pycache__", *data)
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, folder / file)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def new_environment(folder: Path, requirement: str, resolution: str = "highest") -> Path:
    """Return the programs of a new environment with what the resolver gives today, without constraints.

    `resolution` lowest-direct: the lowest versions that pyproject.toml names.
    """
    uv = (sys.executable, "-m", "uv", "--quiet")
    run(*uv, "venv", "--python", sys.executable, folder)
    run(*uv, "pip", "install", "--python", folder / "bin" / "python", "--resolution", resolution, requirement)
    return folder / "bin"


@pytest.fixture(scope="module")
def base_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with only the wheel and its dependencies."""
    return new_environment(tmp_path_factory.mktemp("base") / "environment", str(wheel))


@pytest.fixture(scope="module", params=["highest", "lowest-direct"])
def service_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return the programs of an environment with the service."""
    folder = tmp_path_factory.mktemp("service") / "environment"
    return new_environment(folder, f"{wheel}[service]", request.param)


def test_wheel_holds_the_three_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "foreshock",
        "foreshock_service",
        "foreshock_probes",
    }


def test_base_install_has_three_dependencies_and_imports_no_service(base_environment: Path, tmp_path: Path) -> None:
    names = run(
        base_environment / "python",
        "-c",
        "import sys, foreshock; foreshock.Client, foreshock.AdviceFeed, foreshock.apply_scale;"
        "above = {'torch', 'fastapi', 'sqlalchemy', 'pydantic', 'foreshock_service', 'foreshock_probes'};"
        "print(sorted({name.split('.')[0] for name in sys.modules} & above))",
        PWD=str(tmp_path),
    )
    assert names.strip() == "[]"


def test_base_install_has_the_certificates_of_the_registry(base_environment: Path, tmp_path: Path) -> None:
    asked = "from foreshock.certify.registry import entries; print(len(entries()))"
    found = run(base_environment / "python", "-c", asked, PWD=str(tmp_path))
    assert int(found) == len(list((REPOSITORY / "registry").glob("*.json"))) > 0
    assert "report" in run(base_environment / "foreshock", "--help", PWD=str(tmp_path))


def test_command_without_its_extra_names_the_extra(base_environment: Path, tmp_path: Path) -> None:
    outcome = subprocess.run(
        [base_environment / "foreshock", "serve"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert outcome.returncode == 2
    assert "foreshock[service]" in outcome.stderr
    assert "Traceback" not in outcome.stderr


UPLOAD = """
import sys
import foreshock

with foreshock.Client(sys.argv[1], run_key="from-the-wheel", spool_directory="spool") as client:
    client.log_rollouts(1, {
        "sample_id": ["a", "b"], "prompt_token_ids": [[1], [2]], "response_token_ids": [[3, 4], [5]],
        "rollout_log_probs": [[-1.0, -2.0], [-0.5]], "trainer_log_probs": [[-1.1, -2.0], [-0.5]],
    })
    assert client.flush(60)
"""


@pytest.mark.timeout(1500)
def test_service_of_the_wheel_takes_an_upload_and_shows_it(service_environment: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [service_environment / "foreshock", "serve", "--port", str(port)],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env=ENVIRONMENT | {"FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"},
        )
    try:
        wait_until_answered(f"{url}/readyz", lambda: server.poll() is None, tmp_path / "serve.log", 600)
        run(service_environment / "python", "-c", UPLOAD, url, PWD=str(tmp_path))
        curves = httpx.get(f"{url}/v1/runs/from-the-wheel/measurements", timeout=60).json()["columns"]
        assert curves["step"] == [1, 1]
        for path in ("/", "/runs/default/from-the-wheel", "/v1/runs/from-the-wheel/lr-advice", "/metrics"):
            assert httpx.get(url + path, timeout=60).status_code == 200, path
        unknown = httpx.get(f"{url}/v1/runs?projet=a", timeout=60)
        assert (unknown.status_code, "did you mean 'project'" in unknown.text) == (422, True)
        assert httpx.get(f"{url}/openapi.json", timeout=60).json()["info"]["title"]
    finally:
        server.terminate()
        assert server.wait(timeout=120) == 0
    # On a slow machine a third line says that the service is ready.
    started, listens, *_ = (tmp_path / "serve.log").read_text().splitlines()
    assert started.startswith("Foreshock 0.")
    assert listens.startswith(f"Foreshock listens on {url}")


def test_folders_named_service_and_probes_disturb_no_command(service_environment: Path, tmp_path: Path) -> None:
    for name in ("service", "probes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the folder of somebody else')")
    environment = {"PYTHONPATH": str(tmp_path), "PWD": str(tmp_path)}
    assert "--show-settings" in run(service_environment / "foreshock", "serve", "--help", **environment)
