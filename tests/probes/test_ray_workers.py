"""Workers on a real, local Ray: placed by accelerator type, restarted when they are killed, stopped by a signal."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from foreshock.digests import weights_digest
from foreshock.errors import ConfigurationError
from foreshock_probes.ray_workers import RayPlacement
from tests.ports import free_port
from tests.probes.conftest import RunningService
from tests.probes.test_worker import ProbedRun, start_run
from tests.probes.tiny import make_rollouts
from tests.waiting import wait_until

_ACTOR = "ray::WorkerActor"
# Said on both sides: without it, a head asks for a token if this user's home has one, and a client sends none.
_AUTHENTICATION = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@dataclass(frozen=True)
class RayCluster:
    """A Ray of this module's own: its address and the process of which all others of it descend."""

    address: str
    head: int

    def actors(self) -> dict[int, psutil.Process]:
        """The processes of this cluster's workers, by process id."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.head).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if any(part.startswith(_ACTOR) for part in process.cmdline()[:1]):
                        found[process.pid] = process
        # An engine that is being started has its worker's name until it runs its own program.
        return {pid: process for pid, process in found.items() if _parent(process) not in found}

    def wait_until_empty(self) -> None:
        """Wait until Ray has ended the actors of a driver that is gone. It does so after the driver's end."""
        wait_until(lambda: not self.actors(), 120, self.actors)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray cluster of one node that declares two H100, as processes of its own."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fs-ray-", dir="/tmp") as folder:
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
            "--node-ip-address=127.0.0.1", "--num-cpus=2", "--num-gpus=2", "--include-dashboard=false",
            "--disable-usage-stats", "--object-store-memory=100000000", f"--temp-dir={folder}",
            '--resources={"accelerator_type:H100": 2}',
        ]  # fmt: skip
        log = Path(folder) / "head.log"
        with log.open("wb") as sink:
            environment = {**os.environ, **_AUTHENTICATION}
            head = subprocess.Popen(
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            wait_until_logged(log, "Ray runtime started", head)
            yield RayCluster(f"127.0.0.1:{port}", head.pid)
        finally:
            _end(head)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and every one that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return None


@contextlib.contextmanager
def workers_on_ray(
    service: RunningService, cluster: RayCluster, root: Path, log: Path, accelerator_type: str = "H100"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `foreshock worker --ray` with two workers until the block ends."""
    command = [
        sys.executable, "-m", "foreshock_probes.commands", "--ray", "--workers", "2",
        "--accelerator-type", accelerator_type, "--cpus-per-worker", "0.5",
        "--scorers", "torch.float32", "--name", "on-ray",
    ]  # fmt: skip
    environment = {
        **os.environ, **_AUTHENTICATION, "RAY_ADDRESS": cluster.address, "FORESHOCK_URL": service.url,
        "FORESHOCK_ACCELERATOR": "cpu", "FORESHOCK_WEIGHTS_ROOTS": f"runs={root}", "FORESHOCK_LEASE_WAIT_SECONDS": "1",
        "FORESHOCK_SHUTDOWN_GRACE_SECONDS": "1",
    }  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        _end(process)
        cluster.wait_until_empty()


def wait_until_logged(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    def logged() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        return text in log.read_text(errors="replace")

    wait_until(logged, 120, lambda: log.read_text(errors="replace"))


@pytest.fixture
def run(service: RunningService) -> Iterator[ProbedRun]:
    """A run that is deleted after the test."""
    started = start_run(service, make_rollouts(150))
    yield started
    service.http.delete(f"/v1/runs/{started.run}")


@pytest.mark.slow
def test_a_killed_worker_is_restarted_by_ray_and_its_job_is_done(
    service: RunningService, run: ProbedRun, checkpoints: Path, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    run.announce(weights_digest(checkpoints / "first"))
    with workers_on_ray(service, ray_cluster, checkpoints, tmp_path / "log") as process:
        wait_until_logged(tmp_path / "log", "starting 2 workers on Ray", process)
        # One rollout at a time, so that there is time to kill its worker.
        probe = run.probe("torch.float32", options={"torch.float32": {"batch_size": 1}})
        run.wait_for(probe, {"running"})
        # The one that has the job, and the other if it is there already.
        before = ray_cluster.actors()
        assert before
        for each in before.values():
            each.kill()
        # Two workers start anew, each with torch: minutes on a busy machine.
        done = run.wait_for(probe, {"done", "failed"}, 400)
        after = ray_cluster.actors()
        assert process.poll() is None
    assert done["state"] == "done"
    (job,) = done["jobs"]
    assert job["attempts"] >= 2
    assert job["worker"] in ("on-ray-0", "on-ray-1")
    assert "lease expired" in job["reasons"][0]
    assert after
    assert not set(after) & set(before)


@pytest.mark.slow
def test_workers_end_with_a_signal_and_wait_for_an_accelerator_that_is_missing(
    service: RunningService, checkpoints: Path, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with workers_on_ray(service, ray_cluster, checkpoints, log, accelerator_type="A100") as process:
        wait_until_logged(log, "the cluster has no accelerator of type A100 (it has: H100)", process)
        ray_cluster.wait_until_empty()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def test_a_worker_that_is_placed_by_accelerator_type_has_one_gpu_and_unlimited_restarts() -> None:
    placed = RayPlacement(8, "H100").options()
    assert (placed["accelerator_type"], placed["num_gpus"]) == ("H100", 1.0)
    assert (placed["max_restarts"], placed["max_task_retries"]) == (-1, -1)
    anywhere = RayPlacement(2).options()
    assert "accelerator_type" not in anywhere
    assert anywhere["num_gpus"] == 0.0
    assert RayPlacement(2, "H100", gpus=4).options()["num_gpus"] == 4


def test_a_number_of_workers_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--workers must be at least 1, got 0"):
        RayPlacement(0)
