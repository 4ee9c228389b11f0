"""A client that a generator makes of the OpenAPI document: whole, and it speaks with the service."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_wheel import ENVIRONMENT
from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow

DOCUMENT = """
import json, sys
from foreshock_service.app import create_app
from foreshock_service.platform.settings import Settings

json.dump(create_app(Settings()).openapi(), open(sys.argv[1], "w"))
"""

CALLS = """
from fastapi.testclient import TestClient
from foreshock_service.app import create_app
from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.settings import Settings
from generated import Client
from generated.api.diagnosis import read_diagnosis
from generated.api.runs import create_run, list_runs
from generated.models import RunCreate

settings = Settings()
upgrade(settings.database_url)
with TestClient(create_app(settings), base_url="http://127.0.0.1") as http:
    client = Client(base_url="http://127.0.0.1").set_httpx_client(http)
    made = create_run.sync(client=client, body=RunCreate(key="a"))
    assert [each.id for each in list_runs.sync(client=client).items] == [made.id]
    print(read_diagnosis.sync(made.id, client=client).headline)
    print(list_runs.sync(client=client, limit=-1).title)
"""

BINARY = """content_type_overrides:
  application/vnd.apache.parquet: application/octet-stream
  application/vnd.foreshock.statistics: application/octet-stream
"""
"""What a user of the generator writes: it knows no media type but octet-stream that is a file."""


def test_generated_client_has_every_operation_and_registers_a_run(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(tool), "openapi-python-client==0.29.1"],
        check=True, env=ENVIRONMENT,
    )  # fmt: skip
    (tmp_path / "config.yml").write_text(BINARY)
    environment = os.environ | {
        "FORESHOCK_DATA_DIRECTORY": str(tmp_path),
        "FORESHOCK_DATABASE_URL": f"sqlite:///{tmp_path / 'foreshock.db'}",
    }

    def python(*arguments: str, **added: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY,
            env=environment | added,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout + done.stderr

    document = str(tmp_path / "openapi.json")
    python("-c", DOCUMENT, document)
    said = python(
        "-m", "openapi_python_client", "generate", "--path", document, "--meta", "none", "--config",
        str(tmp_path / "config.yml"), "--output-path", str(tmp_path / "generated"),
        PYTHONPATH=str(tool),
    )  # fmt: skip
    assert "Endpoint will not be generated" not in said, said[-3000:]
    assert "Unable to" not in said, said[-3000:]
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(tmp_path)]
    headline, refusal = python("-c", CALLS, PYTHONPATH=os.pathsep.join(paths)).splitlines()[-2:]
    assert headline.startswith("Unknown")
    assert refusal
