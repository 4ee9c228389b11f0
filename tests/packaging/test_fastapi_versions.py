"""The service with the newest FastAPI and with the lowest one that it allows: a valid document, a run and a shard."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packaging.test_wheel import ENVIRONMENT
from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow

CHECK = r"""
import json, re, sys
from fastapi import __version__
from fastapi.testclient import TestClient
from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.settings import Settings
from tests.foreshock.batches import random_batch

settings = Settings()
upgrade(settings.database_url)
app = create_app(settings)
document = app.openapi()
named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
assert named <= document["components"]["schemas"].keys(), named - document["components"]["schemas"].keys()
assert "HTTPValidationError" not in json.dumps(document)
with TestClient(app, base_url="http://127.0.0.1") as http:
    run = http.post("/v1/runs", json={"key": "a"}).raise_for_status().json()["id"]
    http.post(f"/v1/runs/{run}/attempts", json={"key": "a", "resume_step": 0}).raise_for_status()
    body = encode_rollouts(random_batch(1))
    path = f"/v1/runs/{run}/steps/1/rollouts/0?attempt=1&shards=1"
    http.put(path, content=body, headers={"Content-Type": "application/vnd.apache.parquet"}).raise_for_status()
    refused = http.put(path.replace("attempt=1", "attempt=x"), content=body)
    assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json")
print(__version__)
"""


@pytest.mark.parametrize("version", ["newest", "lowest"])
def test_document_is_valid_and_a_shard_arrives(tmp_path: Path, version: str) -> None:
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["service"]
    (lowest,) = [each.partition(">=")[2] for each in extra if each.startswith("fastapi>=")]
    packages = ["fastapi", "starlette"] if version == "newest" else [f"fastapi=={lowest}"]
    installed = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "fastapi")]
    subprocess.run([*installed, *packages], check=True, env=ENVIRONMENT)
    paths = [str(tmp_path / "fastapi"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    (tmp_path / "data").mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "FORESHOCK_DATA_DIRECTORY": str(tmp_path / "data"),
        "FORESHOCK_DATABASE_URL": f"sqlite:///{tmp_path / 'data' / 'foreshock.db'}",
    }
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False, env=environment,
                          cwd=REPOSITORY)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert version == "newest" or done.stdout.startswith(lowest)
