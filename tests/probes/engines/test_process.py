"""Tests of real engine processes: scoring, crash, timeout, abandoned job and end of the worker."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from foreshock.digests import weights_digest
from foreshock.rollouts import decode_scores, encode_rollouts
from foreshock_probes.engines.process import EngineError, EnginePool, EngineProcess, EngineTimeouts, JobAbandonedError
from foreshock_probes.engines.protocol import ScoreCommand
from tests.probes.tiny import make_rollouts

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess("torch", tmp_path)
    yield process
    process.close()


def score_command(folder: Path, weights: Path, rollouts: int = 5, **fields: Any) -> ScoreCommand:
    """Return a command whose rollouts are written to `folder`."""
    (folder / "rollouts.parquet").write_bytes(encode_rollouts(make_rollouts(rollouts)))
    values: dict[str, Any] = {
        "scorer": "torch.float32",
        "variant": "",
        "weights_folder": str(weights),
        "weights_digest": weights_digest(weights),
        "weights_version": None,
        "options": {},
        "accelerator": "cpu",
        "rollouts": str(folder / "rollouts.parquet"),
        "scores": str(folder / "scores.parquet"),
    }
    return ScoreCommand(**(values | fields))


def test_processes_that_an_engine_spawns_import_its_main_module(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The import holds them to the instruction set of the engine; multiprocessing imports no module named __main__.
    words = psutil.Process(engine.pid).cmdline()
    name = words[words.index("-m") + 1]
    monkeypatch.setitem(sys.modules, "__main__", importlib.import_module(name))
    prepared = multiprocessing.spawn.get_preparation_data("child")
    assert prepared["init_main_from_name"] == name
    assert not name.endswith("__main__")


def wait_until_gone(pid: int, seconds: float = 20.0) -> bool:
    """Return True if the process ends in time; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_engine_reports_progress_and_stays_for_the_next_command(
    engine: EngineProcess, tmp_path: Path, checkpoints: Path
) -> None:
    progress: list[int] = []
    command = score_command(tmp_path, checkpoints / "first", options={"batch_size": 2})
    engine.score(command, progress.append)
    scores = decode_scores((tmp_path / "scores.parquet").read_bytes())
    rollouts = make_rollouts(5)
    assert scores.sample_ids == rollouts.sample_ids
    assert scores.num_tokens == rollouts.num_tokens == progress[-1]
    assert progress == sorted(progress)
    # One report a batch: of sequences of 22, 19, 17, 16 and 6 tokens only 17 and 16 pad little enough to share a batch.
    assert len(progress) == 4
    pid = engine.pid
    # The process continues after a command that fails.
    with pytest.raises(EngineError, match="no_such_option") as caught:
        engine.score(command.model_copy(update={"options": {"no_such_option": 1}}), progress.append)
    assert (caught.value.kind, caught.value.gone) == ("final", False)
    with pytest.raises(EngineError, match="needs an engine process of vllm"):
        engine.score(command.model_copy(update={"scorer": "vllm.prefill"}), progress.append)
    engine.score(command, progress.append)
    assert (engine.pid, engine.alive()) == (pid, True)


def test_unreadable_rollouts_raise(engine: EngineProcess, tmp_path: Path, checkpoints: Path) -> None:
    command = score_command(tmp_path, checkpoints / "first")
    (tmp_path / "rollouts.parquet").write_bytes(b"not Parquet")
    with pytest.raises(EngineError, match="InvalidRolloutsError") as caught:
        engine.score(command, lambda tokens: None)
    assert caught.value.kind == "final"


def test_error_for_killed_engine_has_the_end_of_its_log(
    engine: EngineProcess, tmp_path: Path, checkpoints: Path
) -> None:
    command = score_command(tmp_path, checkpoints / "first", rollouts=1000, options={"batch_size": 1})
    killed = threading.Event()

    def kill(tokens: int) -> None:
        if not killed.is_set():
            os.kill(engine.pid, signal.SIGKILL)
            killed.set()

    with pytest.raises(EngineError, match="signal 9") as caught:
        engine.score(command, kill)
    assert (caught.value.kind, caught.value.gone) == ("retry", True)
    assert "torch.float32" in caught.value.reason  # what the engine printed last
    assert not engine.alive()
    assert not (tmp_path / "scores.parquet").exists()


def test_engine_without_messages_is_ended_after_the_timeout(tmp_path: Path, checkpoints: Path) -> None:
    # Loading torch takes seconds, in which the engine sends no message.
    engine = EngineProcess("torch", tmp_path, EngineTimeouts(start_seconds=60, silence_seconds=0.3))
    with pytest.raises(EngineError, match=r"no message for 0\.3 s") as caught:
        engine.score(score_command(tmp_path, checkpoints / "first"), lambda tokens: None)
    assert caught.value.kind == "retry"
    assert wait_until_gone(engine.pid)


def test_abandoned_job_ends_its_engine(tmp_path: Path, checkpoints: Path) -> None:
    engine = EngineProcess("torch", tmp_path)
    command = score_command(tmp_path, checkpoints / "first", rollouts=1000, options={"batch_size": 1})
    seen: list[int] = []
    with pytest.raises(JobAbandonedError):
        engine.score(command, seen.append, abandoned=lambda: len(seen) > 5)
    assert wait_until_gone(engine.pid)
    engine.close()


def test_closing_ends_the_process(engine: EngineProcess) -> None:
    engine.close()
    assert wait_until_gone(engine.pid)
    assert not engine.alive()
    engine.close()


def test_engine_exits_when_its_worker_dies(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from foreshock_probes.engines.process import EngineProcess\n"
        f"print(EngineProcess('torch', Path({str(tmp_path)!r})).pid, flush=True)\n"
        "time.sleep(3)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert worker.returncode == -signal.SIGKILL
    assert wait_until_gone(int(worker.stdout), seconds=60)


def test_api_key_is_not_passed_to_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_API_KEY", "fsk_very_secret")
    engine = EngineProcess("torch", tmp_path)
    try:
        assert "FORESHOCK_API_KEY" not in psutil.Process(engine.pid).environ()
    finally:
        engine.close()


def test_pool_keeps_torch_for_other_weights_and_replaces_dead_processes(tmp_path: Path, checkpoints: Path) -> None:
    pool = EnginePool(tmp_path)
    try:
        scores, pids = [], []
        for name in ("first", "second", "first"):
            pool.score(score_command(tmp_path, checkpoints / name), lambda tokens: None)
            scores.append(decode_scores((tmp_path / "scores.parquet").read_bytes()).log_probs.tobytes())
            pids.append(pool.process_ids()["torch"])
        assert scores[0] == scores[2] != scores[1]
        assert len(set(pids)) == 1
        os.kill(pids[0], signal.SIGKILL)
        assert wait_until_gone(pids[0])
        pool.score(score_command(tmp_path, checkpoints / "second"), lambda tokens: None)
        assert decode_scores((tmp_path / "scores.parquet").read_bytes()).log_probs.tobytes() == scores[1]
        last = pool.process_ids()["torch"]
        assert last != pids[0]
    finally:
        pool.close()
    assert wait_until_gone(last)
