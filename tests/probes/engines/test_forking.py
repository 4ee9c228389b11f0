"""An engine that needs a process for each model gets one, from a parent that loads none. Here with torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from probes.engines.protocol import Failed, Progress, ScoreCommand, Scored, parse_reply
from tests.probes.engines.test_process import command, wait_until_gone

pytestmark = pytest.mark.slow

CODE = """
import sys
import transformers.models.qwen3.modeling_qwen3
from probes.engines.forking import serve_by_children
sys.exit(serve_by_children("torch", int(sys.argv[1]), int(sys.argv[2])))
"""


class Parent:
    """A process that serves by children, in a process group of its own."""

    def __init__(self) -> None:
        requests, self.requests = os.pipe()
        replies, write = os.pipe()
        self.replies = os.fdopen(replies, "rb")
        arguments = [sys.executable, "-c", CODE, str(requests), str(write)]
        self.process = subprocess.Popen(arguments, pass_fds=(requests, write), start_new_session=True)
        os.close(requests)
        os.close(write)

    def no_more_requests(self) -> None:
        if self.requests >= 0:
            os.close(self.requests)
            self.requests = -1

    def ask(self, asked: ScoreCommand) -> None:
        os.write(self.requests, asked.line())

    def score(self, asked: ScoreCommand) -> int:
        """Have `asked` done; return the process that did it."""
        self.ask(asked)
        while isinstance(reply := parse_reply(self.replies.readline()), Progress):
            pass
        assert isinstance(reply, Scored), reply
        return reply.pid


@pytest.fixture
def parent() -> Iterator[Parent]:
    started = Parent()
    yield started
    started.no_more_requests()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()
    started.replies.close()


def test_each_model_has_a_process_of_its_own_and_all_leave_with_the_worker(
    parent: Parent, tmp_path: Path, checkpoints: Path
) -> None:
    first, second = (command(tmp_path, checkpoints / name) for name in ("first", "second"))
    pids = [parent.score(first), parent.score(first), parent.score(second)]
    assert pids[0] == pids[1] != pids[2]
    assert wait_until_gone(pids[0])
    assert parent.process.pid not in pids
    refused = first.model_copy(update={"options": {"no_such_option": 1}})
    parent.ask(refused)
    reply = parse_reply(parent.replies.readline())
    assert isinstance(reply, Failed)
    assert "no_such_option" in reply.reason
    last = psutil.Process(parent.process.pid).children()
    assert len(last) == 1
    parent.no_more_requests()
    assert parent.process.wait(timeout=30) == 0
    assert wait_until_gone(last[0].pid)


def test_a_child_that_is_killed_takes_its_parent_with_it(parent: Parent, tmp_path: Path, checkpoints: Path) -> None:
    parent.ask(command(tmp_path, checkpoints / "first", rollouts=1000, options={"batch_size": 1}))
    assert isinstance(parse_reply(parent.replies.readline()), Progress)
    os.kill(psutil.Process(parent.process.pid).children()[0].pid, signal.SIGKILL)
    assert parent.process.wait(timeout=30) == -signal.SIGKILL


def test_a_child_leaves_when_its_parent_is_killed(parent: Parent, tmp_path: Path, checkpoints: Path) -> None:
    child = parent.score(command(tmp_path, checkpoints / "first"))
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.process.wait()
    assert wait_until_gone(child)
