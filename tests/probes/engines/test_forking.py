"""Tests of engines with a process for each model, with torch as the engine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from foreshock_probes.engines.protocol import Failed, Progress, Reply, ScoreCommand, Scored, parse_reply
from tests.probes.engines.test_process import score_command, wait_until_gone
from tests.probes.tiny import save_checkpoint

pytestmark = pytest.mark.slow

CODE = """
import sys
import transformers.models.qwen3.modeling_qwen3
from foreshock_probes.child_process import connection_to_parent
from foreshock_probes.engines.forking import serve_with_children
sys.exit(serve_with_children("torch", connection_to_parent(int(sys.argv[1]))))
"""


class Parent:
    """A process that serves with a child for each model, in a process group of its own."""

    def __init__(self) -> None:
        self.connection, its = multiprocessing.Pipe()
        arguments = [sys.executable, "-c", CODE, str(its.fileno())]
        self.process = subprocess.Popen(arguments, pass_fds=(its.fileno(),), start_new_session=True)
        its.close()

    def send(self, command: ScoreCommand) -> None:
        self.connection.send_bytes(command.encoded())

    def reply(self) -> Reply:
        return parse_reply(self.connection.recv_bytes())

    def score(self, command: ScoreCommand) -> int:
        """Run `command`; return the id of the process that ran it."""
        self.send(command)
        while isinstance(reply := self.reply(), Progress):
            pass
        assert isinstance(reply, Scored), reply
        return reply.pid


@pytest.fixture
def parent() -> Iterator[Parent]:
    started = Parent()
    yield started
    started.connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()


def test_each_model_has_its_own_process_and_all_exit_with_the_worker(
    parent: Parent, tmp_path: Path, checkpoints: Path
) -> None:
    first = score_command(tmp_path, checkpoints / "first")
    other = score_command(tmp_path, save_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=1))
    pids = [parent.score(first), parent.score(first), parent.score(other)]
    assert pids[0] == pids[1] != pids[2]
    assert wait_until_gone(pids[0])
    assert parent.process.pid not in pids
    refused = first.model_copy(update={"options": {"no_such_option": 1}})
    parent.send(refused)
    reply = parent.reply()
    assert isinstance(reply, Failed)
    assert "no_such_option" in reply.reason
    last = psutil.Process(parent.process.pid).children()
    assert len(last) == 1
    parent.connection.close()
    assert parent.process.wait(timeout=30) == 0
    assert wait_until_gone(last[0].pid)


def test_other_weights_of_a_model_go_to_its_process_unless_a_fresh_one_is_asked_for(
    parent: Parent, tmp_path: Path, checkpoints: Path
) -> None:
    first, second = (score_command(tmp_path, checkpoints / name) for name in ("first", "second"))
    fresh = [command.model_copy(update={"fresh": True}) for command in (first, second)]
    pids = [parent.score(fresh[0]), parent.score(fresh[0]), parent.score(second)]
    assert pids[0] == pids[1] == pids[2]
    # It has held other weights: it no longer counts as fresh, with either of them.
    again = parent.score(fresh[1])
    assert again != pids[0]
    assert wait_until_gone(pids[0])
    assert parent.score(fresh[0]) not in (again, pids[0])


def test_parent_of_a_killed_child_ends_by_the_same_signal(parent: Parent, tmp_path: Path, checkpoints: Path) -> None:
    parent.send(score_command(tmp_path, checkpoints / "first", rollouts=1000, options={"batch_size": 1}))
    assert isinstance(parent.reply(), Progress)
    os.kill(psutil.Process(parent.process.pid).children()[0].pid, signal.SIGKILL)
    assert parent.process.wait(timeout=30) == -signal.SIGKILL


def test_child_exits_when_its_parent_is_killed(parent: Parent, tmp_path: Path, checkpoints: Path) -> None:
    child = parent.score(score_command(tmp_path, checkpoints / "first"))
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.process.wait()
    assert wait_until_gone(child)
