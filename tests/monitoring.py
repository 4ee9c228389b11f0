"""Real Prometheus and Alertmanager servers. Tests are skipped with a hint if they are not installed; not in CI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.waiting import wait_until


def program(package: str, *names: str) -> str:
    """Return the path of the first of `names` that is installed."""
    for name in names:
        if (found := shutil.which(name)) is not None:
            return found
    message = f"{names[0]} is not installed: apt-get install {package}"
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(message)
    pytest.skip(message)


def promtool() -> str:
    """Return the path of promtool."""
    return program("prometheus", "promtool")


@contextmanager
def running_prometheus(configuration: dict[str, Any], folder: Path) -> Iterator[str]:
    """Run a Prometheus with this configuration; yield its address."""
    file = folder / "prometheus.json"  # JSON is YAML
    file.write_text(json.dumps(configuration))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("prometheus", "prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    with _running(command, folder / "prometheus.log"):
        yield f"http://{address}"


@contextmanager
def running_alertmanager(configuration: str, folder: Path) -> Iterator[str]:
    """Run an Alertmanager with this configuration, which is YAML; yield its address when it is ready."""
    file = folder / "alertmanager.yml"
    file.write_text(configuration)
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program("prometheus-alertmanager", "prometheus-alertmanager", "alertmanager"),
        f"--config.file={file}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--cluster.listen-address=",
    ]
    with _running(command, folder / "alertmanager.log"):
        wait_until(lambda: _is_ready(url), 240)
        yield url


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """Return the result of an instant query; empty while Prometheus is starting."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=60)
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    result: list[dict[str, Any]] = answer.raise_for_status().json()["data"]["result"]
    return result


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
