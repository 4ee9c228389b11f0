"""Several processes: SIGKILL of the one that supervises them ends them all, and a restart has the port at once."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from tests.service.operation.processes import service_process
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_processes_end_with_a_killed_supervisor_and_a_restart_has_its_port(
    tmp_path: Path, migrated_postgres: str
) -> None:
    settings = {"FORESHOCK_PROCESSES": "2", "FORESHOCK_DATABASE_URL": migrated_postgres}
    with service_process(tmp_path, **settings) as service:
        # It is ready as soon as one of its processes is: two of the service, and a decoder of each.
        supervisor = psutil.Process(service.process.pid)
        started = wait_until(lambda: found if len(found := supervisor.children(recursive=True)) >= 4 else [])
        service.process.kill()
        service.process.wait(timeout=60)
        with service_process(tmp_path, service.port, **settings) as restarted:
            assert httpx.get(f"{restarted.url}/livez", timeout=60).status_code == 200
            assert psutil.wait_procs(started, timeout=60)[1] == []
