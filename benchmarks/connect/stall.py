"""Part `stall` of `make bench-connect`: the cost to a training thread while 3 M tokens are logged from numpy arrays.

    python -m benchmarks.connect stall

A process computes in one thread, in pure Python or small products of torch, for steps of 10 s. In each step it logs
1,024 rollouts of 3,000 tokens (40 MB), to the real service and to an address where nothing listens (`train_and_log`).
Figures are medians of 5 steps.

    gap      the longest time between two iterations of the thread, the call included
    stall    the same without the time in which other processes had the cores
    call     `log_rollouts` and `log_scalars`, without the time in which other processes had the cores
    waited   all time of the step in which the thread was neither on a core nor ready (it waited for the GIL, a lock,
             the disk, or a hypervisor had given its core away)
    cost     the call, and what the thread waited beyond the control, as a share of 10 s
    slower   iterations per second on a core, relative to the control

Each step that logs follows a control that logs nothing: a control's stall and wait are the machine's own effect on a
thread. The wait of the control is subtracted only from the cost, never from the stall.

Bars: stall below 10 ms, cost below 1 %, for both threads, with the service and without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import foreshock
from benchmarks.bars import Line
from benchmarks.running_service import running_service
from tests.ports import free_port

ROLLOUTS, RESPONSE_TOKENS, PROMPT_TOKENS = 1_024, 3_000, 200
STEP_SECONDS, LOG_AFTER_SECONDS = 10.0, 1.0
STEPS = 5
_NOTED_GAP_SECONDS = 0.001


BAR_STALL_MS, BAR_COST = 10.0, 0.01
THREADS = ("python", "torch")

Steps = list[dict[str, Any]]


def run() -> list[Line]:
    """Print the table; return the largest median stall in ms, the largest cost as a share, and the CPU of a step."""
    print(f"load average: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    columns = ("gap ms", "stall ms", "largest", "call ms", "waited ms", "cost", "slower", "background CPU s")
    print(f"{'thread':8}{'service':9}" + "".join(f"{name:>{len(name) + 2}}" for name in columns))
    stalls, costs, background = [0.0], [0.0], [0.0]
    with tempfile.TemporaryDirectory(prefix="foreshock-stall-") as name:
        for thread in THREADS:
            for service in ("alive", "dead"):
                steps = _train(thread, service, Path(name) / f"{thread}-{service}")
                control = [step for step in steps if not step["logged"]]
                logged = [step for step in steps if step["logged"]]
                _print_row(thread, "control", control, control)
                cost, stall = _print_row(thread, service, logged, control)
                costs.append(cost)
                stalls.append(stall)
                background.append(_median(logged, "background_cpu") / 1e3)
    return [
        Line("stall_ms", "longest stall, ms", max(stalls), BAR_STALL_MS),
        Line("stall_cost", "cost, share of a step", max(costs), BAR_COST),
        Line("stall_background_cpu_s", "CPU of the background, s a step", max(background)),
    ]


def _train(thread: str, service: str, folder: Path) -> Steps:
    folder.mkdir()
    if service == "dead":
        return _run_trainer(thread, f"http://127.0.0.1:{free_port()}", folder)
    with running_service(folder) as url:
        return _run_trainer(thread, url, folder)


def _run_trainer(thread: str, url: str, folder: Path) -> Steps:
    command = [sys.executable, "-m", "benchmarks.connect.stall", thread, url, str(folder / "spool")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if finished.returncode != 0:
        raise RuntimeError(f"the trainer failed: {finished.stderr[-2000:]}")
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]


def _median(steps: Steps, name: str) -> float:
    return float(median(step[name] for step in steps))


def _print_row(thread: str, service: str, steps: Steps, control: Steps) -> tuple[float, float]:
    """Print medians of the steps; return cost and stall."""
    stall = _median(steps, "longest_stall")
    waited = max(0.0, _median(steps, "waited") - _median(control, "waited"))
    cost = (_median(steps, "call_net") + waited) / (1e3 * STEP_SECONDS)
    slower = 1.0 - _median(steps, "iterations_per_second") / _median(control, "iterations_per_second")
    print(
        f"{thread:8}{service:9}{_median(steps, 'longest_gap'):8.1f}{stall:10.1f}"
        f"{max(step['longest_stall'] for step in steps):9.1f}{_median(steps, 'call_net'):9.1f}"
        f"{_median(steps, 'waited'):11.1f}{cost:6.2%}{slower:8.1%}{_median(steps, 'background_cpu') / 1e3:18.2f}",
        flush=True,
    )
    return cost, stall


class _Schedule:
    """The system's scheduling times of the calling thread."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read(self) -> tuple[float, float]:
        """Return the seconds on a core, and the seconds ready but without a core."""
        running, ready, _ = os.pread(self._file, 64, 0).split()
        return int(running) / 1e9, int(ready) / 1e9


def arrays(seed: int) -> dict[str, Any]:
    """Return the columns of a step: 3.07 M response tokens, 40 MB."""
    random = np.random.default_rng(seed)
    tokens = ROLLOUTS * RESPONSE_TOKENS
    behaviour = -random.exponential(0.5, tokens).astype(np.float32)
    noise = random.normal(0.0, 0.01, tokens).astype(np.float32)
    return {
        "prompt_token_ids": random.integers(0, 150_000, ROLLOUTS * PROMPT_TOKENS).astype(np.int32),
        "prompt_offsets": np.arange(ROLLOUTS + 1) * PROMPT_TOKENS,
        "response_token_ids": random.integers(0, 150_000, tokens).astype(np.int32),
        "response_offsets": np.arange(ROLLOUTS + 1) * RESPONSE_TOKENS,
        "response_mask": np.ones(tokens, np.uint8),
        "rollout_log_probs": behaviour,
        "trainer_log_probs": np.minimum(behaviour + noise, 0.0).astype(np.float32),
        "group_id": [str(row // 8) for row in range(ROLLOUTS)],
        "reward": random.random(ROLLOUTS).astype(np.float32),
        "advantage": random.normal(size=ROLLOUTS).astype(np.float32),
    }


def train(compute: Callable[[], object], log: Callable[[], None] | None) -> dict[str, float]:
    """Compute for one step, call `log` after a second, and return the times that the thread lost, in ms."""
    schedule = _Schedule()
    gap = stall = call = call_net = 0.0
    iterations = 0
    process_begin = time.process_time()
    begin = last = time.perf_counter()
    running_begin, ready_begin = schedule.read()
    ready_before = ready_begin
    while last - begin < STEP_SECONDS:
        if log is not None and last - begin > LOG_AFTER_SECONDS:
            _, ready = schedule.read()
            called = time.perf_counter()
            log()
            call = time.perf_counter() - called
            call_net = call - (schedule.read()[1] - ready)
            log = None
        compute()
        now = time.perf_counter()
        iterations += 1
        if now - last > _NOTED_GAP_SECONDS:
            ready = schedule.read()[1]
            gap = max(gap, now - last)
            stall = max(stall, now - last - (ready - ready_before))
            ready_before, now = ready, time.perf_counter()
        elif iterations % 256 == 0:
            ready_before, now = schedule.read()[1], time.perf_counter()
        last = now
    running, ready = schedule.read()
    on_core = running - running_begin
    return {
        "logged": call > 0,
        "longest_gap": 1e3 * gap,
        "longest_stall": 1e3 * stall,
        "call_net": 1e3 * call_net,
        "waited": 1e3 * (time.perf_counter() - begin - on_core - (ready - ready_begin)),
        "iterations_per_second": iterations / on_core,
        "background_cpu": 1e3 * (time.process_time() - process_begin - on_core),
    }


def computation(kind: str) -> Callable[[], object]:
    """Return some computation of a training loop: 20 µs of Python, or 0.1 ms of torch on one core."""
    if kind == "python":
        return lambda: sum(number * number for number in range(400))
    import torch

    torch.set_num_threads(1)
    weights = torch.randn(192, 192)
    return lambda: torch.relu(weights @ weights)


def train_and_log() -> None:
    """Train: steps without and with logging alternate."""
    kind, url, spool = sys.argv[1:4]
    compute = computation(kind)
    columns = [arrays(step) for step in range(STEPS)]
    client = foreshock.Client(url, run_key=f"stall {kind}", spool_directory=Path(spool), exit_seconds=60.0)
    client.start_run(model="none")
    # A trainer loads a model between the start of the run and its first step.
    time.sleep(2.0)
    for step, rollouts in enumerate(columns):

        def log(step: int = step, rollouts: dict[str, Any] = rollouts) -> None:
            client.log_rollouts(step, rollouts)
            client.log_scalars(step, {"grad_norm": 0.3})

        print(json.dumps(train(compute, None)), flush=True)
        print(json.dumps(train(compute, log)), flush=True)
    counters = client.counters.snapshot()
    if counters.dropped or counters.invalid or counters.accepted != 1 + 2 * STEPS:
        raise SystemExit(f"not everything was logged: {counters}")
    client.close()


if __name__ == "__main__":
    train_and_log()
