"""The demo does its work once, reports errors, and leaves no process behind."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.demo.service_child import HOST, USUAL_PORT, only_demo_of, own_port
from scripts.screenshot import IMAGES, LARGEST_DIFFERENCE, difference, pictures
from tests.paths import REPOSITORY
from tests.waiting import wait_until

MOST_LINES = 40
REPLAYED_STEPS = 2


def start_demo(data: Path, *options: str) -> subprocess.Popen[str]:
    # Tests started in the background inherit an ignored SIGINT; their children would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--data", str(data), *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


def finish(demo: subprocess.Popen[str]) -> str:
    output, _ = demo.communicate(timeout=600)
    return output


def children_of(data: Path) -> list[psutil.Process]:
    """Return the processes of a demo on `data`, found by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(data) in process.environ().get("FORESHOCK_STORE_URL", ""):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until_no_child_is_left(data: Path) -> None:
    """Wait until all of them have ended; a killed process may take a moment to disappear."""
    wait_until(lambda: not children_of(data), 120)


def test_error_for_ended_child_has_the_end_of_its_log(tmp_path: Path) -> None:
    with Child("service", ["no-such-command"], {}, tmp_path / "service.log") as child:
        while child.exit_code is None:
            time.sleep(0.05)
        with pytest.raises(DemoError, match=r"the service ended with exit code 2(.|\n)*no-such-command"):
            child.require_running()


def test_another_port_is_used_if_the_usual_one_is_taken() -> None:
    with socket.socket() as taken:
        try:
            taken.bind((HOST, USUAL_PORT))
            taken.listen()
        except OSError:
            pass  # Something else has it: just as good.
        with own_port() as port:
            assert port != USUAL_PORT


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with only_demo_of(tmp_path), pytest.raises(DemoError, match="another demo"), only_demo_of(tmp_path):
        pass


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_second_start_of_the_demo_repeats_no_work(tmp_path: Path) -> None:
    first = start_demo(tmp_path, "--once")
    output = finish(first)
    assert first.returncode == 0, output
    # A newcomer reads one screen: both runs, and of the collapsed one its link, its setting, what to do and the advice.
    assert len(output.splitlines()) <= MOST_LINES
    screen = " ".join(output.split())
    for expected in (
        "Healthy",
        "Critical since step 53: the reward fell from 0.82",
        "the trainer does not apply it",
        "Divide the trainer's logits by the same temperature",
        "in shadow mode: the rate × 0.5 from step",
        "Pages: http://127.0.0.1:",
    ):
        assert expected in screen, output
    # On another kind of CPU than that of the recorded run, the link has that difference too, and no cause is named.
    is_like_the_run = "ran in different environments" not in screen
    assert ("is in one link, trainer against replay" if is_like_the_run else "ends of trainer/torch.trainer") in screen
    assert "failed" not in output
    wait_until_no_child_is_left(tmp_path)
    worked = (tmp_path / "worker.log").stat().st_mtime_ns
    scores = count(tmp_path, "scores")
    assert scores >= REPLAYED_STEPS * 3
    second = start_demo(tmp_path)
    try:
        output = wait_for(second, "The pages stay up until Ctrl-C")
        assert output.count("nothing to do: it is stored already") == 2
        address = re.findall(r"http://127\.0\.0\.1:\d+", output)[0]
        for picture, taken in pictures(address):
            if is_like_the_run or picture.name != "step":
                assert difference(taken, IMAGES / f"{picture.name}.png") < LARGEST_DIFFERENCE, "run make screenshot"
        assert children_of(tmp_path)
    finally:
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=120)
    assert second.returncode == 0
    wait_until_no_child_is_left(tmp_path)
    assert (tmp_path / "worker.log").stat().st_mtime_ns == worked
    assert count(tmp_path, "scores") == scores
    assert count(tmp_path, "runs") == count(tmp_path, "attempts") == 2


def wait_for(demo: subprocess.Popen[str], text: str) -> str:
    """Return what it prints, up to the line with the text."""
    assert demo.stdout is not None
    output = ""
    for line in demo.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"the demo ended without printing {text!r}:\n{output}")


def count(data: Path, table: str) -> int:
    with sqlite3.connect(data / "foreshock.db") as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
