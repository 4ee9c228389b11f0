"""The worker and the real service: scores arrive, failures have reasons, lost leases are dropped, stops are clean."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.environment import EngineEnvironment, offered_environments
from foreshock_probes.settings import WorkerSettings
from foreshock_probes.worker import Worker
from tests.probes.conftest import LEASE_SECONDS, RunningService
from tests.probes.tiny import make_rollouts, save_checkpoint
from tests.service import sending
from tests.service.sending import Sender
from tests.service.working import announce_checkpoint, ask_for_probe
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TORCH = ("torch.trainer", "torch.bfloat16", "torch.float32")


@dataclass(frozen=True, slots=True)
class ProbedRun:
    """A run with one closed step of rollouts, and calls on it."""

    service: RunningService
    run: str

    def announce(self, digest: str, path: str = "first", step: int = 1) -> None:
        announce_checkpoint(Sender(self.service.http, self.run), step, digest, path=path)

    def probe(self, *scorers: str, **fields: Any) -> str:
        """Request a probe; a scorer is written `name` or `name@variant`."""
        answer = ask_for_probe(Sender(self.service.http, self.run), 1, scorers, **fields)
        return str(answer.raise_for_status().json()["id"])

    def get(self, path: str) -> Any:
        """Return what is at a path below the run."""
        return self.service.http.get(f"/v1/runs/{self.run}/{path}").raise_for_status().json()

    def read(self, probe: str) -> dict[str, Any]:
        found: dict[str, Any] = self.service.http.get(f"/v1/probes/{probe}").raise_for_status().json()
        return found

    def wait_for(self, probe: str, states: set[str], seconds: float = 180.0) -> dict[str, Any]:
        wait_until(lambda: self.read(probe)["state"] in states, seconds, lambda: self.read(probe))
        return self.read(probe)


def start_run(service: RunningService, rollouts: RolloutBatch, project: str = "default") -> ProbedRun:
    sender = sending.start_run(service.http, uuid.uuid4().hex, project=project)
    sender.put_shard(1, rollouts).raise_for_status()
    return ProbedRun(service, sender.run)


@pytest.fixture
def run(service: RunningService) -> Iterator[ProbedRun]:
    """A run that is deleted after the test, so that no other test's worker leases its jobs."""
    started = start_run(service, make_rollouts(12))
    yield started
    service.http.delete(f"/v1/runs/{started.run}")


def settings(service: RunningService, root: Path, **fields: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "url": service.url, "weights_roots": {"runs": root}, "accelerator": "cpu", "lease_wait_seconds": 1.0,
    }  # fmt: skip
    return WorkerSettings(**(values | fields))


def run_worker(
    service: RunningService, root: Path, jobs: int = 1, scorers: tuple[str, ...] = TORCH, **fields: Any
) -> str:
    """Run `jobs` jobs; return the worker's console output."""
    console = StringIO()
    for _ in range(jobs):
        worker = Worker(settings(service, root, **fields), WorkerConsole(console), scorers=scorers)
        worker.run(once=True, until_idle_seconds=60.0)
    return console.getvalue()


def test_worker_sends_texts_of_tokens_with_weights(service: RunningService, run: ProbedRun, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "first", seed=1)
    vocabulary = {f"word{number}": number for number in range(10_000)}
    Tokenizer(WordLevel(vocabulary, unk_token="word0")).save(str(folder / "tokenizer.json"))
    run.announce(weights_digest(folder))
    probe = run.probe("torch.float32")
    run_worker(service, tmp_path)
    assert run.read(probe)["state"] == "done"
    sample = make_rollouts(12).sample_ids[0]
    page = service.http.get(f"/pages/runs/{run.run}/steps/1/rollout", params={"sample_id": sample}).json()
    assert all(page["texts"][str(each)] == f"word{each}" for each in page["ids"])


def test_probe_is_scored_and_its_links_are_measured(service: RunningService, run: ProbedRun, checkpoints: Path) -> None:
    run.announce(weights_digest(checkpoints / "first"))
    scorers = ("torch.trainer", "torch.float32", "torch.float32@rebatched")
    probe = run.probe(*scorers, options={"torch.trainer": {"batch_size": 4}})
    # Two, if a worker of another test offers one of the scorers only.
    jobs = len(run.read(probe)["jobs"])
    output = run_worker(service, checkpoints, jobs)
    found = run.read(probe)
    assert found["state"] == "done", output
    links = service.http.get(
        f"/v1/runs/{run.run}/measurements", params={"comparison": "torch.float32/torch.trainer", "measure": "k3_kl"}
    )
    assert found["jobs"][0]["attempts"] == 1
    assert links.status_code == 200
    assert "torch.float32@rebatched: " in output
    assert "started and loaded in " in output


@pytest.mark.skipif(not offered_environments(), reason="this CPU cannot be held to an instruction set")
def test_job_is_scored_in_the_requested_environment(service: RunningService, checkpoints: Path) -> None:
    name, environment = next(iter(offered_environments().items()))
    lengths = make_rollouts(12).response_lengths.tolist()
    logged = [np.full(length, -1.0, np.float32) for length in lengths]
    run = start_run(service, make_rollouts(12, rollout_log_probs=logged))
    run.announce(weights_digest(checkpoints / "first"))
    probe = run.probe("torch.trainer", environment=name)
    output = run_worker(service, checkpoints)
    (job,) = run.read(probe)["jobs"]
    assert (job["state"], job["environment"]) == ("done", name), output
    address = f"/v1/runs/{run.run}/steps/1/attribution"
    wait_until(lambda: service.http.get(address).status_code != 503)
    (source,) = service.http.get(address).raise_for_status().json()["scores"]
    held = EngineEnvironment.of_fingerprint(Fingerprint.from_dict(source["fingerprint"]))
    assert held.instruction_set is environment.instruction_set
    service.http.delete(f"/v1/runs/{run.run}")


def test_unusable_weights_end_the_probe_and_the_worker_continues(service: RunningService, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_checkpoint(root / "first", seed=1)
    (root / "link").symlink_to("/usr")
    (root / "pickled").mkdir()
    (root / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    cases: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"digest": "sha256:" + "0" * 64}, "failed", "not the announced ones"),
        ({"path": "gone"}, "skipped", "moved or deleted"),
        ({"path": "link"}, "failed", "symbolic link"),
        ({"path": "pickled"}, "skipped", "needs_conversion"),
        ({}, "done", ""),
    )
    probed: list[tuple[ProbedRun, str]] = []
    for announced, _, _ in cases:
        run = start_run(service, make_rollouts(3))
        run.announce(**({"digest": weights_digest(root / "first")} | announced))
        probed.append((run, run.probe("torch.float32")))
    console = StringIO()
    Worker(settings(service, root), WorkerConsole(console), scorers=TORCH).run(until_idle_seconds=2.0)
    for (run, probe), (_, state, reason) in zip(probed, cases, strict=True):
        found = run.read(probe)
        assert found["state"] == state, console.getvalue()
        assert reason in (found["reason"] or "")
        service.http.delete(f"/v1/runs/{run.run}")


def test_root_of_one_project_scores_nothing_of_another_and_tells_nothing_of_it(
    service: RunningService, checkpoints: Path
) -> None:
    """The other project guesses the name and the path of a checkpoint; the worker serves both projects."""
    run = start_run(service, make_rollouts(3), project="curious")
    run.announce("sha256:" + "0" * 64)
    probe = run.probe("torch.float32")
    run_worker(service, checkpoints, jobs=3, weights_roots={"runs@default": checkpoints})
    found = run.read(probe)
    assert found["state"] == "failed"
    assert "no weights root 'runs' for the project 'curious'" in found["reason"]
    assert weights_digest(checkpoints / "first") not in found["reason"]
    service.http.delete(f"/v1/runs/{run.run}")


def test_job_whose_engine_dies_is_tried_again_and_nothing_is_published(
    service: RunningService, run: ProbedRun, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.announce(weights_digest(checkpoints / "first"))
    monkeypatch.setenv("FORESHOCK_TRAINER_FORWARD", "tests.probes.engines.misbehaving:dying")
    probe = run.probe("torch.own")
    output = run_worker(service, checkpoints, scorers=("torch.own",))
    found = run.read(probe)
    (job,) = found["jobs"]
    assert (found["state"], job["state"], job["attempts"]) == ("queued", "queued", 1), output
    (reason,) = job["reasons"]
    assert "was ended by signal 9" in reason
    assert "the last line before its death" in reason
    assert service.http.get(f"/v1/runs/{run.run}/steps/1/attribution").status_code == 404


def long_job(service: RunningService, checkpoints: Path) -> tuple[ProbedRun, str]:
    """Start a run with a slow job: torch has to be loaded, and rollouts are scored one at a time."""
    started = start_run(service, make_rollouts(300))
    started.announce(weights_digest(checkpoints / "first"))
    return started, started.probe("torch.float32", options={"torch.float32": {"batch_size": 1}})


def test_worker_drops_the_job_of_a_deleted_run(service: RunningService, checkpoints: Path) -> None:
    started, probe = long_job(service, checkpoints)
    console = StringIO()
    worker = Worker(settings(service, checkpoints), WorkerConsole(console), scorers=TORCH)
    thread = threading.Thread(target=lambda: worker.run(once=True, until_idle_seconds=60.0))
    thread.start()
    started.wait_for(probe, {"running"})
    service.http.delete(f"/v1/runs/{started.run}").raise_for_status()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert "dropped, lease lost" in console.getvalue()
    assert "Traceback" not in console.getvalue()


def test_worker_drops_a_job_whose_lease_expired_and_another_worker_completed(
    service: RunningService, checkpoints: Path, tmp_path: Path
) -> None:
    started, probe = long_job(service, checkpoints)
    with worker_process(service, checkpoints, tmp_path) as (frozen, log):
        first = started.wait_for(probe, {"running"})["jobs"][0]["worker"]
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + 1)
        output = run_worker(service, checkpoints, worker_name="the-second")
        done = started.read(probe)
        frozen.send_signal(signal.SIGCONT)
        wait_until(lambda: "dropped, lease lost" in log.read_text(), 120)
        assert frozen.poll() is None
    assert done["state"] == "done", output
    assert (done["jobs"][0]["worker"], first) == ("the-second", "the-first")
    assert started.read(probe) == done


@contextmanager
def worker_process(
    service: RunningService, root: Path, folder: Path, scorers: tuple[str, ...] = TORCH, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `foreshock worker` as a user does; yield the process and its log."""
    log = folder / "worker.log"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    variables |= {
        "FORESHOCK_URL": service.url, "FORESHOCK_WEIGHTS_ROOTS": f"runs={root}", "FORESHOCK_ACCELERATOR": "cpu",
        "FORESHOCK_LEASE_WAIT_SECONDS": "30", **environment,
    }  # fmt: skip
    command = [sys.executable, "-m", "foreshock_probes.commands", "--name", "the-first", "--scorers", ",".join(scorers)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=variables, stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def test_stopped_worker_returns_its_job_to_a_queue(service: RunningService, checkpoints: Path, tmp_path: Path) -> None:
    started, probe = long_job(service, checkpoints)
    with worker_process(service, checkpoints, tmp_path, FORESHOCK_SHUTDOWN_GRACE_SECONDS="0.2") as (process, log):
        started.wait_for(probe, {"running"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, log.read_text()
    found = started.read(probe)
    assert found["state"] == "queued"
    assert any("SIGTERM" in reason for reason in found["jobs"][0]["reasons"])
    service.http.delete(f"/v1/runs/{started.run}")


def test_stopped_worker_finishes_its_job_within_the_grace_time(
    service: RunningService, run: ProbedRun, checkpoints: Path, tmp_path: Path
) -> None:
    run.announce(weights_digest(checkpoints / "first"))
    probe = run.probe("torch.float32")
    with worker_process(service, checkpoints, tmp_path, FORESHOCK_SHUTDOWN_GRACE_SECONDS="120") as (process, log):
        run.wait_for(probe, {"running"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, log.read_text()
    assert run.read(probe)["state"] == "done"


def test_idle_worker_stops_immediately(service: RunningService, checkpoints: Path, tmp_path: Path) -> None:
    with worker_process(service, checkpoints, tmp_path) as (process, log):
        wait_until(lambda: "offering" in log.read_text(), 120)
        time.sleep(1)  # now it waits for a job, for up to 30 s
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - start < 25
        assert "stopped (SIGTERM)" in log.read_text()


def test_worker_retries_while_the_service_is_unreachable(checkpoints: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        console = StringIO()
        away = WorkerSettings(url=url, weights_roots={"runs": checkpoints}, accelerator="cpu")
        Worker(away, WorkerConsole(console), scorers=TORCH).run(until_idle_seconds=3.4)
    assert console.getvalue().count("; retrying in ") >= 2
    assert "exiting" in console.getvalue()
