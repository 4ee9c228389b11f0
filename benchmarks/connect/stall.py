"""Part `stall` of `make bench-connect`: what a training thread pays while 3 M tokens are logged from numpy arrays.

    python -m benchmarks.connect.stall

A process computes for steps of 10 s in one thread, pure Python or small products of torch, and logs 1,024 rollouts of
3,000 tokens (40 MB) in each step, to the real service and to an address where nothing listens
(`benchmarks/connect/stall_trainer.py`). Figures are medians of 5 steps.

    gap      the longest time between two iterations of the thread, the call included
    stall    the same without the time in which other processes had the cores
    call     `log_rollouts` and `log_scalars`, without the time in which other processes had the cores
    waited   all time of the step in which the thread was neither on a core nor ready (it waited for the GIL, a lock,
             the disk, or a hypervisor had given its core away)
    cost     the call, and what the thread waited beyond the control, as a share of 10 s
    slower   iterations per second on a core, relative to the control

Each step that logs follows a control that logs nothing: a control's stall and wait are what the machine itself does to
a thread. The wait of the control is taken off the cost only, never off the stall.

Bars: stall below 10 ms, cost below 1 %, for both threads, with the service and without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.connect.stall_trainer import STEP_SECONDS
from benchmarks.running_service import free_port, running_service

BAR_STALL_MS, BAR_COST = 10.0, 0.01
THREADS = ("python", "torch")

Steps = list[dict[str, Any]]


def run() -> dict[str, float]:
    """Print the table; return the largest median stall in ms, the largest cost as a share, and the CPU of a step."""
    print(f"load average: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    columns = ("gap ms", "stall ms", "largest", "call ms", "waited ms", "cost", "slower", "background CPU s")
    print(f"{'thread':8}{'service':9}" + "".join(f"{name:>{len(name) + 2}}" for name in columns))
    found: dict[str, float] = {"stall_ms": 0.0, "stall_cost": 0.0, "stall_background_cpu_s": 0.0}
    with tempfile.TemporaryDirectory(prefix="foreshock-stall-") as name:
        folder = Path(name)
        for thread in THREADS:
            for service in ("alive", "dead"):
                steps = _train(thread, service, folder / f"{thread}-{service}")
                control = [step for step in steps if not step["logged"]]
                logged = [step for step in steps if step["logged"]]
                _print_row(thread, "control", control, control)
                cost, stall = _print_row(thread, service, logged, control)
                background = _median(logged, "background_cpu") / 1e3
                found["stall_ms"] = max(found["stall_ms"], stall)
                found["stall_cost"] = max(found["stall_cost"], cost)
                found["stall_background_cpu_s"] = max(found["stall_background_cpu_s"], background)
    return found


def reached(found: dict[str, float]) -> bool:
    """Return True if the figures of `run` reach the bars."""
    return found["stall_ms"] < BAR_STALL_MS and found["stall_cost"] < BAR_COST


def _train(thread: str, service: str, folder: Path) -> Steps:
    folder.mkdir()
    if service == "dead":
        return _run_trainer(thread, f"http://127.0.0.1:{free_port()}", folder)
    with running_service(folder) as url:
        return _run_trainer(thread, url, folder)


def _run_trainer(thread: str, url: str, folder: Path) -> Steps:
    command = [sys.executable, "-m", "benchmarks.connect.stall_trainer", thread, url, str(folder / "spool")]
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


def main() -> int:
    """Measure, print the figures, and return 1 if a bar is missed."""
    found = run()
    passed = reached(found)
    print(*(f"{name}={value:.4g}" for name, value in found.items()), f"passed={passed}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
