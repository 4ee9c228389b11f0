"""`foreshock serve` and `foreshock keys` as an operator runs them, in separate processes."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.service.running import environment, foreshock
from tests.waiting import wait_until_answered

pytestmark = pytest.mark.slow


def test_a_used_port_is_refused_before_the_service_says_that_it_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = foreshock(tmp_path, "serve", "--port", str(port))
    assert refused.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: another program listens on port {port}" in refused.stderr
    assert "listens on http" not in refused.stdout
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "foreshock-data").exists(), "a refused service leaves nothing behind"


def test_keys_can_be_created_listed_and_revoked_and_guard_the_service(tmp_path: Path) -> None:
    refused = foreshock(tmp_path, "serve", "--host", "0.0.0.0")
    assert refused.returncode == 1
    assert "foreshock keys create" in refused.stderr
    elsewhere = foreshock(tmp_path / "tokens", "keys", "list", FORESHOCK_DATABASE_URL="sqlite:///./foreshock.db")
    assert elsewhere.returncode == 1
    assert f"there is no database {tmp_path}/tokens/foreshock.db" in elsewhere.stderr
    made = foreshock(tmp_path, "keys", "create", "trainer", "--scope", "read", "--scope", "ingest")
    assert made.returncode == 0, made.stderr
    key_id, secret = made.stdout.partition(":")[0], made.stdout.splitlines()[-1]
    assert secret.startswith("fsk_")
    listed = foreshock(tmp_path, "keys", "list").stdout
    assert key_id in listed
    assert secret not in listed

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "foreshock.commands.main", "serve", "--host", "0.0.0.0", "--port", str(port)],
        env=environment(tmp_path, FORESHOCK_BOOTSTRAP_KEY="a key for a container's start"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_answered(f"{url}/readyz", lambda: process.poll() is None)
        bearer = {"Authorization": f"Bearer {secret}"}
        assert httpx.get(f"{url}/v1/runs", timeout=60).status_code == 401
        assert httpx.get(f"{url}/v1/runs", headers=bearer, timeout=60).status_code == 200
        lost = foreshock(tmp_path, "keys", "create", "b", FORESHOCK_DATABASE_URL="sqlite:///./b.db", FORESHOCK_URL=url)
        assert f"the service at {url} uses another database" in lost.stderr
        assert not (tmp_path / "b.db").exists()
        assert foreshock(tmp_path, "keys", "revoke", key_id).returncode == 0
        assert httpx.get(f"{url}/v1/runs", headers=bearer, timeout=60).status_code == 401
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode in (0, 130)
    assert "a key for a container's start" not in output
    shown = foreshock(tmp_path, "serve", "--show-settings", FORESHOCK_BOOTSTRAP_KEY="a key for a container's start")
    assert shown.returncode == 0
    assert "FORESHOCK_BOOTSTRAP_KEY=********" in shown.stdout.splitlines()
    lines = [line for line in output.splitlines() if line.startswith("Foreshock ")]
    assert lines[0].endswith(f" starts with {tmp_path / 'foreshock.db'}")
    assert lines[1].startswith(f"Foreshock listens on http://0.0.0.0:{port}")
    assert foreshock(tmp_path, "keys", "revoke", "key_nobody").returncode == 1
