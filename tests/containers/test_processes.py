"""The processes of docker-compose.yml, started by hand with its commands, environments and files, work together.

Replaced are what only containers have: host names, folders and ports. PostgreSQL is the machine's.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
import yaml
from obstore.store import S3Store

from benchmarks.running_service import running_service
from tests.containers.test_compose import environment_of
from tests.monitoring import ask, program, running_prometheus
from tests.paths import PROMETHEUS, REPOSITORY
from tests.ports import free_port
from tests.service.postgres import start_postgres
from tests.service.sending import make_batch, start_run
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KEY = "fsk_0123456789abcdef0123456789abcdef"
SECRETS = {
    "POSTGRES_PASSWORD": "unused",
    "OBJECT_STORE_PASSWORD": "of-the-object-store",
    "FORESHOCK_BOOTSTRAP_KEY": KEY,
    "FORESHOCK_SESSION_SECRET": "of-the-sessions-0123456789",
}
# Environments of this machine that processes need, beside those of the compose file.
MACHINE = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}


@dataclass(frozen=True, slots=True)
class Running:
    """The processes that run."""

    http: httpx.Client
    store: str
    store_environment: dict[str, str]
    folder: Path


@contextmanager
def process(command: list[str], values: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        started = subprocess.Popen(command, env=MACHINE | values, cwd=log.parent, stdout=sink, stderr=sink)
        try:
            yield started
        finally:
            started.terminate()
            started.wait(60)


def store_command(service: dict[str, Any], folder: Path, port: int) -> list[str]:
    """Return the object store's command with a folder and ports of its own."""
    (folder / "objects").mkdir()
    beside = Path(sys.executable).with_name("weed")
    replaced = {"-dir=/data": f"-dir={folder / 'objects'}", "-s3.port=8333": f"-s3.port={port}"}
    assert replaced.keys() <= set(service["command"])
    words = [replaced.get(word, word) for word in service["command"]]
    own = [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer", "admin")]
    grpc = [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3", "admin")]
    return [str(beside) if beside.exists() else program("seaweedfs", "weed"), *words, *own, *grpc]


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    return found


@pytest.fixture(scope="module")
def running(services: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("compose")
    port = free_port()
    store = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        cluster = start_postgres()
        stack.callback(cluster.stop)
        values = environment_of(services["object-store"], SECRETS)
        command = store_command(services["object-store"], folder, port)
        stack.enter_context(process(command, values, folder / "object-store.log"))
        (check,) = [word for word in services["object-store"]["healthcheck"]["test"] if word.startswith("http")]
        wait_until(lambda: answers(check.replace("http://127.0.0.1:8333", store)), seconds=60)
        of_service = environment_of(services["service"], SECRETS) | {
            "FORESHOCK_DATABASE_URL": cluster.new_database(),
            "FORESHOCK_STORE_ENDPOINT": store,
            "FORESHOCK_STORE_TEMPORARY_FOLDER": str(folder / "temporary"),
            "FORESHOCK_TOKEN_PASS": "numpy",
        }
        url = stack.enter_context(running_service(folder, **of_service))
        headers = {"Authorization": f"Bearer {KEY}"}
        http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
        yield Running(http, store, values, folder)


def answers(url: str) -> bool:
    """Return what `wget --spider` tells a health check."""
    try:
        return httpx.head(url, timeout=2).is_success
    except httpx.TransportError:
        return False


def bucket(running: Running) -> S3Store:
    return S3Store(
        "foreshock",
        endpoint=running.store,
        access_key_id=running.store_environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=running.store_environment["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        client_options={"allow_http": True},
    )


def test_tokens_of_an_upload_are_in_the_bucket(running: Running) -> None:
    sender = start_run(running.http, "compose")
    sender.put_shard(1, make_batch(4)).raise_for_status()
    names = [item["path"] for items in obstore.list(bucket(running)) for item in items]
    assert [name for name in names if name.startswith(f"tokens/{sender.run}/")]
    assert sender.get("steps/1/tokens", worst=2).status_code == 200


def test_object_store_asks_for_its_password(running: Running) -> None:
    assert httpx.get(f"{running.store}/foreshock", timeout=60).status_code == 403


def test_service_asks_for_its_key(running: Running) -> None:
    assert httpx.get(f"{running.http.base_url}/v1/runs", timeout=60).status_code == 401


def test_worker_starts_with_its_environment(running: Running, services: dict[str, dict[str, Any]]) -> None:
    values = environment_of(services["worker"], SECRETS) | {
        "FORESHOCK_URL": str(running.http.base_url),
        "FORESHOCK_API_KEY": KEY,
        "FORESHOCK_WEIGHTS_ROOTS": f"checkpoints={running.folder}",
    }
    command = [sys.executable, "-m", "foreshock.commands.main", "worker", "--scorers", "torch.float32"]
    with process(command, values, running.folder / "worker.log"):
        workers = wait_until(lambda: running.http.get("/v1/hardware").json()["workers"], seconds=120)
    assert workers[0]["accelerator"] == "cpu"


def test_prometheus_scrapes_with_the_configuration_of_the_repository(running: Running) -> None:
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    key = running.folder / "scrape_api_key"
    key.write_text(KEY)
    assert job["authorization"]["credentials_file"] == "/run/secrets/scrape_api_key"
    job["authorization"]["credentials_file"] = str(key)
    job["static_configs"][0]["targets"] = [str(running.http.base_url).removeprefix("http://").rstrip("/")]
    configuration["global"]["scrape_interval"] = "1s"
    job["scrape_timeout"] = "1s"
    configuration["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    del configuration["alerting"]
    with running_prometheus(configuration, running.folder) as prometheus:
        wait_until(lambda: ask(prometheus, 'up{job="foreshock"} == 1'), seconds=60)
        found = wait_until(lambda: ask(prometheus, "foreshock_build_info"), seconds=60)
    assert found[0]["metric"]["public_url"] == "http://localhost:8765"
