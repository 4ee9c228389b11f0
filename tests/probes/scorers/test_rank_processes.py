"""Ranks work together; one that dies, fails or refuses ends all of them, with the reason and without a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from foreshock.errors import ForeshockError
from foreshock_probes.scorers.rank_processes import RankError, RankProcesses
from tests.paths import PYTHONPATH
from tests.probes.scorers.rank_tasks import act

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STARTER = """
import sys, time
from foreshock_probes.scorers.rank_processes import RankProcesses
from tests.probes.scorers.rank_tasks import act

if __name__ == "__main__":
    ranks = RankProcesses(2, act, on_gpus=False)
    ranks.run("", lambda done: None)
    print(*ranks.process_ids, flush=True)
    time.sleep(100)
"""


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2, act, on_gpus=False)
    yield processes
    processes.close()


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=60)[1]


def test_ranks_do_tasks_together_until_one_dies(ranks: RankProcesses) -> None:
    processes = [psutil.Process(each) for each in ranks.process_ids]
    reported: list[int] = []
    assert ranks.run("", reported.append) == [2, 2]
    assert ranks.run("", reported.append) == [2, 2]
    assert max(reported) == 3
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 was ended by signal 9 .*out-of-memory"):
        ranks.run("die", lambda done: None)
    assert time.monotonic() - start < 60
    assert all_gone(processes)


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [("refuse", ForeshockError, "refused by rank 1"), ("fail", RankError, "rank 1 failed with ValueError: rank 1 can")],
)
def test_an_error_of_one_rank_ends_all(ranks: RankProcesses, task: str, error: type[Exception], words: str) -> None:
    processes = [psutil.Process(each) for each in ranks.process_ids]
    with pytest.raises(error, match=words):
        ranks.run(task, lambda done: None)
    assert all_gone(processes)


def test_ranks_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "starter.py"
    script.write_text(STARTER, "utf-8")
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(each)) for each in starter.stdout.readline().split()]
        assert len(processes) == 2
        os.kill(starter.pid, signal.SIGKILL)
    assert all_gone(processes)
