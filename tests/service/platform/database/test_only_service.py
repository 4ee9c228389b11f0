"""Two services on one SQLite file: the second one says what to do, and a killed one leaves nothing in the way."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.opening import only_service
from tests.service.operation.processes import service_process


def test_services_share_a_postgresql_database() -> None:
    with only_service("postgresql://a/b"), only_service("postgresql://a/b"):
        pass


def test_started_service_refuses_a_second_one_in_its_folder_and_starts_again_after_sigkill(tmp_path: Path) -> None:
    with service_process(tmp_path) as first:
        command = [sys.executable, "-m", "foreshock.commands.main", "serve", "--port", "0"]
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert second.returncode != 0
        assert f"another service (process {first.process.pid})" in second.stderr
        assert "Traceback" not in second.stderr
        first.process.kill()
        first.process.wait(timeout=60)
        with service_process(tmp_path):
            pass


def test_lock_that_cannot_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    # For any user, root included; a file of another user is refused in the same way.
    (tmp_path / "foreshock.db.lock").mkdir()
    refusal = pytest.raises(ConfigurationError, match=r"foreshock\.db\.lock cannot be opened")
    with refusal, only_service(f"sqlite:///{tmp_path}/foreshock.db"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_folder_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with only_service(f"sqlite:///{tmp_path}/foreshock.db"):
        pass
