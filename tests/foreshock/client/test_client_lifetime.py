"""Tests of the client when its process is killed, forks or exits, and after close."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.foreshock.client.faulty_service import FaultyService, faulty_service
from tests.foreshock.client.trainer import rollouts, spooled_bodies
from tests.paths import REPOSITORY
from tests.ports import free_port


def run_trainer(lines: str, url: str, spool: Path) -> subprocess.CompletedProcess[str]:
    """Run a process that logs five steps with a client, and then `lines`."""
    program = textwrap.dedent("""
        import os, signal, sys, time
        from pathlib import Path
        from foreshock import Client
        from tests.foreshock.client.trainer import rollouts, spooled_bodies
        spool = Path(sys.argv[2])
        client = Client(sys.argv[1], run_key="run", attempt_key="first", spool_directory=spool, exit_seconds=100.0)
        for step in range(5):
            client.log_rollouts(step, rollouts(step))
    """) + textwrap.dedent(lines)
    return subprocess.run(
        [sys.executable, "-c", program, url, str(spool)],
        cwd=REPOSITORY, timeout=300, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_next_client_sends_spooled_items_of_a_killed_one_first(make: Any, tmp_path: Path) -> None:
    port, spool = free_port(), tmp_path / "spool"
    until_spooled = """
        while client.counters.spooled < 6:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_trainer(until_spooled, f"http://127.0.0.1:{port}", spool).returncode == -signal.SIGKILL
    kept = spooled_bodies(spool)
    with faulty_service(port=port) as service:
        client = make(url=service.url, attempt_key="next")
        client.start_run(resume_step=5)
        client.log_rollouts(5, rollouts(5))
        assert client.flush(60)
        assert service.attempts == ["first", "next"]
        assert service.bodies("rollouts")[:5] == kept
        attempts = [item.query["attempt"] for item in service.received if "rollouts" in item.path]
        assert attempts == ["1"] * 5 + ["2"]
        assert client.counters.recovered == 6


def test_process_exit_delivers_pending_items(service: FaultyService, tmp_path: Path) -> None:
    assert run_trainer("", service.url, tmp_path).returncode == 0
    assert len(service.bodies("rollouts")) == 5


def test_process_exit_does_not_wait_for_a_service_that_is_down(tmp_path: Path) -> None:
    ended = run_trainer("print(time.monotonic())", f"http://127.0.0.1:{free_port()}", tmp_path)
    assert time.monotonic() - float(ended.stdout) < 60
    assert len(spooled_bodies(tmp_path)) == 5


def test_forked_child_logs_nothing_and_parent_continues(make: Any, service: FaultyService) -> None:
    client = make()
    client.log_scalars(1, {"x": 1})
    assert client.flush(60)
    # The lock is held as by another thread, which does not exist in the child.
    with client.counters._lock:
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        client.log_scalars(2, {"x": 2})
        flushed = client.flush(5)
        client.close()
        os._exit(0 if client.counters.dropped_closed == 1 and not flushed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.log_scalars(3, {"x": 3})
    assert client.flush(60)
    assert [path.split("/")[5] for path in service.paths() if "scalars" in path] == ["1", "3"]


def test_calls_after_close_are_only_counted(make: Any) -> None:
    client = make()
    client.start_run()
    client.close()
    client.log_rollouts(1, rollouts())
    client.finish()
    client.close()
    assert client.counters.dropped_closed == 2


def test_clients_that_a_silent_service_holds_end_within_one_timeout(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, time
        from foreshock import Client
        made = [
            Client(sys.argv[1], run_key=f"run-{each}", spool_directory=f"{sys.argv[2]}/{each}", exit_seconds=8.0)
            for each in range(3)
        ]
        for client in made:
            for step in range(100):
                client.log_scalars(step, {"a": 1.0})
        time.sleep(1)
        if sys.argv[3] == "close":
            begin = time.monotonic()
            for client in made:
                client.close()
            assert time.monotonic() - begin < 22, "the second and the third do not wait anew"
        print("ends", flush=True)
    """)
    with faulty_service() as service:
        service.always = "held"
        for how in ("close", "exit"):
            command = [sys.executable, "-c", program, service.url, str(tmp_path / how), how]
            with subprocess.Popen(
                command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ends\n"
                begin = time.monotonic()
                assert process.wait(120) == 0
                assert time.monotonic() - begin < 22
            assert len(list((tmp_path / how).glob("*/*/*.item"))) == 303
