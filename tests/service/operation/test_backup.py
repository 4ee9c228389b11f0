"""The commands of docs/operations.md for a backup and a restore, word for word, around a service that is killed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.paths import DOCS, PYTHONPATH
from tests.service.operation.processes import service_process
from tests.service.sending import make_batch, start_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the page uses the program sqlite3"),
]


def commands(after: str) -> str:
    """Return the first block of commands after a text of the page."""
    page = (DOCS / "operations.md").read_text()
    found = re.search(r"```\n(.*?)```", page[page.index(after) :], re.DOTALL)
    assert found is not None
    return found.group(1)


def run_commands(lines: str, folder: Path) -> None:
    subprocess.run(["bash", "-euc", lines], cwd=folder, check=True, timeout=60)


def test_documented_backup_is_restored_after_the_service_was_killed(tmp_path: Path) -> None:
    with service_process(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        run = start_run(http)
        for step in range(2):
            run.put_shard(step, make_batch(seed=step)).raise_for_status()
        run_commands(commands("SQLite and a local folder (`.backup`"), tmp_path)
        run.put_shard(2, make_batch(seed=2)).raise_for_status()
        service.process.kill()
        service.process.wait(timeout=60)
    assert (tmp_path / "foreshock-data" / "foreshock.db-wal").stat().st_size, "a kill leaves rows in the -wal"
    run_commands(commands("With SQLite the old folder goes aside"), tmp_path)
    with service_process(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        steps = http.get(f"/v1/runs/{run.run}/steps").json()["items"]
        assert [step["step"] for step in steps] == [0, 1]
        assert http.get(f"/v1/runs/{run.run}/steps/1/tokens").status_code == 200
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    checked = subprocess.run(
        [sys.executable, "-m", "foreshock.commands.main", "check"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": PYTHONPATH}, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert checked.stdout == b"2 files checked, 0 problems\n"


def test_documented_backup_is_private_and_never_overwrites_another(tmp_path: Path) -> None:
    with service_process(tmp_path):
        lines = commands("SQLite and a local folder (`.backup`")
        run_commands(lines, tmp_path)
        assert (tmp_path / "backup").stat().st_mode & 0o077 == 0
        assert (tmp_path / "backup" / "foreshock.db").stat().st_mode & 0o077 == 0
        with pytest.raises(subprocess.CalledProcessError):
            run_commands(lines, tmp_path)
