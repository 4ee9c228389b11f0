"""Tests of real engine processes: scoring, death, hang, rubbish, abandoned job and end of the worker."""

import importlib
import multiprocessing.spawn
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from foreshock.rollouts import decode_scores
from foreshock_probes.engines.process import TASKS, EngineError, JobAbandonedError, process_variables, run_tasks
from foreshock_probes.scorers.request import ScoreTask
from tests.probes.replaying import Asked, scored
from tests.probes.tiny import make_rollouts
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MISBEHAVING = "tests.probes.engines.misbehaving"


def long_task(folder: Path, weights: Path) -> ScoreTask:
    """Return a task of many batches."""
    return Asked(make_rollouts(1000), weights, "torch.float32", options={"batch_size": 1}).task(folder, "long")


def never_read(task: ScoreTask) -> None:
    raise AssertionError(f"the result of {task.scorer} was read")


def is_gone(pid: int) -> bool:
    """Return True if the process has ended; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_tasks_of_an_engine_share_a_process_and_report_progress(tmp_path: Path, checkpoints: Path) -> None:
    rollouts, progress = make_rollouts(5), list[int]()
    asked = [
        Asked(rollouts, checkpoints / name, "torch.float32", options={"batch_size": 2}) for name in ("first", "second")
    ]
    done = run_tasks(
        [each.task(tmp_path, str(number)) for number, each in enumerate(asked)],
        lambda task: decode_scores(task.result.read_bytes()),
        tmp_path,
        report=progress.append,
    )
    first, second = done.results
    assert first.sample_ids == second.sample_ids == rollouts.sample_ids
    assert first.log_probs.tobytes() != second.log_probs.tobytes()
    assert progress == sorted(progress)
    assert progress[-1] == 2 * rollouts.num_tokens
    assert len(done.seconds) == 2
    # Importing torch and loading a model takes longer than scoring a few tokens.
    assert done.start_seconds > sum(done.seconds) > 0
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_refused_task_fails_for_good_and_the_next_is_not_run(tmp_path: Path, checkpoints: Path) -> None:
    asked = Asked(make_rollouts(5), checkpoints / "first", "torch.float32", options={"no_such_option": 1})
    with pytest.raises(EngineError, match="no_such_option") as caught:
        scored(tmp_path, asked, Asked(make_rollouts(5), checkpoints / "first", "torch.float32"))
    assert caught.value.kind == "final"
    assert not (tmp_path / "1.result").exists()


def test_unreadable_rollouts_raise(tmp_path: Path, checkpoints: Path) -> None:
    task = Asked(make_rollouts(5), checkpoints / "first", "torch.float32").task(tmp_path, "one")
    Path(task.rollouts).write_bytes(b"not Parquet")
    with pytest.raises(EngineError, match="InvalidRolloutsError") as caught:
        run_tasks([task], never_read, tmp_path)
    assert caught.value.kind == "final"


@pytest.mark.parametrize(
    ("function", "problem", "last_line"),
    [
        ("die", "was ended by signal 9", "before its death"),
        ("hang", "was ended: no progress for 20 s", "before it hangs"),
        ("leave_rubbish", "left no readable outcome.json", "before the rubbish"),
        ("write_nothing", "left no readable result of torch.float32", "--- torch.float32"),
    ],
)
def test_process_that_dies_hangs_or_leaves_rubbish_fails_with_its_last_lines(
    tmp_path: Path, checkpoints: Path, function: str, problem: str, last_line: str
) -> None:
    asked = Asked(make_rollouts(5), checkpoints / "first", "torch.float32")
    task = asked.task(tmp_path, "result", function=f"{MISBEHAVING}:{function}")
    silence_seconds = 20.0 if function == "hang" else 600.0
    with pytest.raises(EngineError, match=problem) as caught:
        run_tasks(
            [task],
            lambda each: decode_scores(each.result.read_bytes()),
            tmp_path,
            silence_seconds=silence_seconds,
        )
    assert caught.value.kind == "retry"
    assert last_line in caught.value.reason
    assert not [each for each in psutil.Process().children() if "foreshock_probes.score" in each.cmdline()]


def test_abandoned_job_ends_its_process(tmp_path: Path, checkpoints: Path) -> None:
    seen: list[int] = []
    with pytest.raises(JobAbandonedError):
        run_tasks(
            [long_task(tmp_path, checkpoints / "first")], never_read, tmp_path, report=seen.append,
            abandoned=lambda: len(seen) > 5,
        )  # fmt: skip
    assert not [each for each in psutil.Process().children() if "foreshock_probes.score" in each.cmdline()]


def test_process_ends_with_its_worker(tmp_path: Path, checkpoints: Path) -> None:
    task = long_task(tmp_path, checkpoints / "first")
    (tmp_path / "tasks.json").write_bytes(TASKS.dump_json([task]))
    code = (
        "import os, sys, threading\n"
        "from pathlib import Path\n"
        "from foreshock_probes.engines.process import TASKS, run_tasks\n"
        "import psutil\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "def report(tokens):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "tasks = TASKS.validate_json((folder / 'tasks.json').read_bytes())\n"
        "run_tasks(tasks, print, folder, report=report)\n"
    )
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    wait_until(lambda: is_gone(int(worker.stdout)))


def test_api_key_is_not_passed_to_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_API_KEY", "fsk_very_secret")
    assert "FORESHOCK_API_KEY" not in process_variables()


def test_processes_that_an_engine_spawns_import_its_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # The import holds them to the instruction set of the engine; multiprocessing imports no module named __main__.
    monkeypatch.setitem(sys.modules, "__main__", importlib.import_module("foreshock_probes.score"))
    prepared = multiprocessing.spawn.get_preparation_data("child")
    assert prepared["init_main_from_name"] == "foreshock_probes.score"
