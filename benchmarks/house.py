"""Measure the size of the product, and how many of its files one action crosses.

`make bench-house` counts the lines of the product (three packages, migrations, templates, scripts and styles of the
pages), of its tests, the words of its documents, the files and named functions that run for one step, one page and one
poll of the advice, and the files that three kinds of change touch. A profiler in every process of the client and the
service records which functions run in a window; each window counts all that it enters, whatever an earlier one entered.
The step is the fourth of its run, so that the start of the run and its first uses do not count. The poll is that of a
new AdviceFeed in the trainer, with one call of `scale`. `make test` leaves its own duration in build/test_seconds.txt.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import httpx

from benchmarks.bars import Line, report
from benchmarks.running_service import running_service
from foreshock.measures.passes.compiled import prepare
from tests.golden.answers import log_history
from tests.golden.histories import History, histories
from tests.paths import PYTHONPATH

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("foreshock", "service", "probes")
PRODUCT = (*PACKAGES, "migrations")
CHANGES = REPOSITORY / "benchmarks" / "house_changes"
_SUFFIXES = (".py", ".js", ".html", ".css", ".sql")
_BUNDLED = re.compile(r"\.min\.js$")
"""Libraries that the pages bring with them."""

# Recorded in every process that finds this module first on its path: the name of each function of the product that
# starts while the first byte of the shared file is the number of a window. Comprehensions and lambdas have no name.
_SITECUSTOMIZE = """
import mmap, os, sys, threading
_flag = mmap.mmap(os.open(os.environ["HOUSE_FLAG"], os.O_RDWR), 1)
_seen, _top = set(), os.environ["HOUSE_TOP"]
def _hook(frame, event, argument):
    window = _flag[0]
    if event == "call" and window:
        code = frame.f_code
        if (window, code) not in _seen and code.co_filename.startswith(_top) and not code.co_name.startswith("<"):
            _seen.add((window, code))
            place = os.path.realpath(code.co_filename)[len(_top):]
            os.write(_out, f"{window}\\t{place}\\t{code.co_qualname}:{code.co_firstlineno}\\n".encode())
_out = os.open(os.environ["HOUSE_OUT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.setprofile(_hook)
threading.setprofile(_hook)
"""


def product_files(*packages: str) -> list[Path]:
    """Return the tracked sources of the folders, without the libraries that are bundled with the pages."""
    listed = subprocess.run(
        ["git", "ls-files", *packages], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [REPOSITORY / name for name in listed if name.endswith(_SUFFIXES) and not _BUNDLED.search(name)]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def words_of_documents() -> int:
    """Return the words of the documents, as `wc -w` counts them."""
    return sum(len(path.read_text().split()) for path in (REPOSITORY / "docs").glob("**/*.md"))


class Recorder:
    """Records which functions of the product run, in this process's children that were started with `environment`."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        self._flag_file, self._out = folder / "flag", folder / "out"
        self._windows = 0
        self._flag_file.write_bytes(b"\0")
        self._out.touch()
        with self._flag_file.open("r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)
        self.environment = {
            "PYTHONPATH": f"{folder}{os.pathsep}{PYTHONPATH}",
            "HOUSE_FLAG": str(self._flag_file),
            "HOUSE_OUT": str(self._out),
            "HOUSE_TOP": f"{REPOSITORY}{os.sep}",
        }

    def crossed(self, act: Callable[[], object], settle_seconds: float = 0.0) -> tuple[int, int]:
        """Return the numbers of the product's files and functions that run in `act` and `settle_seconds` after it."""
        self._windows += 1
        self._flag[0] = self._windows
        try:
            act()
            time.sleep(settle_seconds)
        finally:
            self._flag[0] = 0
        time.sleep(0.2)
        found = {tuple(line.split("\t")) for line in self._out.read_text().splitlines()}
        own = {
            (file, name)
            for window, file, name in found
            if int(window) == self._windows and file.split(os.sep)[0] in PACKAGES
        }
        if os.environ.get("HOUSE_LIST"):
            print(*sorted(f"{file}: {name}" for file, name in own), sep="\n")
        return len({file for file, _ in own}), len(own)


# Steps of a trainer, in a process of its own that the recorder follows: each line of its input is one action.
_TRAINER = """
import sys
import numpy as np
import foreshock
from foreshock.rollouts import RolloutBatch
client = foreshock.Client(sys.argv[1], run_key="house", spool_directory=sys.argv[2])
client.start_run(model="tiny", initial_learning_rate=1e-6, advice_mode="apply")
feed = None
def batch(step):
    random = np.random.default_rng(step)
    offsets = np.arange(0, 65 * 32, 64)
    mu = -random.exponential(1.0, 2048).astype(np.float32)
    return RolloutBatch.from_arrays(
        sample_ids=[f"{step}-{number}" for number in range(32)], prompt_token_ids=np.arange(32, dtype=np.int32),
        prompt_offsets=np.arange(33), response_token_ids=random.integers(0, 16, 2048).astype(np.int32),
        response_offsets=offsets[:33], rollout_log_probs=mu,
        trainer_log_probs=np.minimum(mu + random.normal(0, 0.02, 2048), 0).astype(np.float32),
        group_ids=[f"g{number // 4}" for number in range(32)],
        reward=random.integers(0, 2, 32).astype(np.float32))
for line in sys.stdin:
    word, _, step = line.strip().partition(" ")
    if word == "step":
        made = batch(int(step))
        print("ready", flush=True); sys.stdin.readline()
        client.log_rollouts(int(step), made)
        while client.flush(1.0).undelivered:
            pass
    elif word == "poll":
        feed = foreshock.AdviceFeed(client)
        feed.scale(int(step))
    print("done", flush=True)
"""


class Trainer:
    """The trainer's process."""

    def __init__(self, url: str, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, url, str(folder / "spool")],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str, answer: str = "done") -> None:
        """Send a line and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        got = self._process.stdout.readline().strip()
        assert got == answer, got

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def recorded_service(folder: Path, recorder: Recorder) -> Iterator[str]:
    # No sweep of the background runs inside a measured window.
    settings = {"FORESHOCK_SWEEP_INTERVAL_SECONDS": "3600", "FORESHOCK_DECODE_PROCESSES": "1"}
    with running_service(folder, **settings, **recorder.environment) as url:
        yield url


def paths() -> dict[str, tuple[int, int]]:
    """Return files and functions that a step, a run's page and a poll of the advice cross."""
    found = {}
    prepare()  # numba keeps the machine code on disk: compiling it under a profiler takes minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(folder)
        with recorded_service(folder, recorder) as url, httpx.Client(base_url=url, timeout=60) as http:
            trainer = Trainer(url, folder, recorder.environment)
            try:
                for step in (1, 2, 3):
                    trainer.say(f"step {step}", "ready")
                    trainer.say("")
                trainer.say("step 4", "ready")
                found["step"] = recorder.crossed(lambda: trainer.say(""), 1.0)
                log_history(http, _probed_history())
                time.sleep(5.0)  # the background derives the run's detection
                found["page"] = recorder.crossed(lambda: http.get("/runs/default/recorded").raise_for_status())
                found["poll"] = recorder.crossed(lambda: trainer.say("poll 4"), 2.0)
            finally:
                trainer.close()
    return found


def _probed_history() -> History:
    """Return the first half of the recorded run, with a probed step and an open alert."""
    recorded = histories()["recorded"]
    return replace(recorded, steps=lambda: islice(recorded.steps(), 80), probed=(40,))


def touched(change: str) -> int | None:
    """Return the number of files that a change touches, as `git diff --stat` counts them; None if it does not exist.

    The change is a patch from a branch; it must still apply.
    """
    patch = CHANGES / f"{change}.patch"
    if not patch.exists():
        return None
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=REPOSITORY, check=True)
    listed = subprocess.run(
        ["git", "apply", "--numstat", str(patch)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return len(listed.stdout.splitlines())


def test_minutes() -> float | None:
    """Return how long the last `make test` of this checkout took; None if there was none."""
    file = REPOSITORY / "build" / "test_seconds.txt"
    return float(file.read_text()) / 60 if file.exists() else None


def measure() -> list[Line]:
    """Return the lines of the table."""
    files = product_files(*PRODUCT)
    crossed = paths()
    return [
        Line("lines", "lines of the product", sum(map(lines_of, files)), 72_000),
        Line("files", "its files", len(files), 540),
        Line("test_lines", "lines of the tests", sum(map(lines_of, product_files("tests"))), 52_000),
        Line("words", "words of the documents", words_of_documents(), 35_000),
        Line("step_files", "files from log_rollouts to stored and closed", crossed["step"][0], 100),
        Line("step_functions", "… functions", crossed["step"][1], 500),
        Line("page_files", "files of a run's page", crossed["page"][0], 80),
        Line("page_functions", "… functions", crossed["page"][1], 300),
        Line("poll_files", "files of an advice poll, client and service", crossed["poll"][0], 25),
        Line("poll_functions", "… functions", crossed["poll"][1], 90),
        Line("measure_files", "files touched by a new measure", touched("measure"), 4),
        Line("rule_files", "… by a new rule", touched("rule"), 2),
        Line("probe_files", "… by a new kind of probe", touched("probe"), 7),
        Line("test_minutes", "make test, minutes", test_minutes(), 15),
    ]


if __name__ == "__main__":
    sys.exit(report(measure()))
