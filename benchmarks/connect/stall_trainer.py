"""The trainer of `benchmarks.connect.stall`: one thread that computes, and logs 3 M tokens once in a step of 10 s.

    python -m benchmarks.connect.stall_trainer {python,torch} URL SPOOL

Prints one JSON line a step. Linux tells what the training thread did (`/proc/thread-self/schedstat`): time on a core,
and time in which it was ready but other processes had the cores. The rest of a gap is a stall: it waited for the GIL, a
lock or the disk.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import foreshock

ROLLOUTS, RESPONSE_TOKENS, PROMPT_TOKENS = 1_024, 3_000, 200
STEP_SECONDS, LOG_AFTER_SECONDS = 10.0, 1.0
STEPS = 5
_NOTED_GAP_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training, in ms; `net` is without the time in which other processes had the cores."""

    logged: bool
    longest_gap: float
    longest_stall: float
    """Net."""
    call: float
    """Wall time of `log_rollouts`."""
    call_net: float
    waited: float
    """Time in which the thread was neither on a core nor ready."""
    iterations_per_second: float
    """Per second on a core."""
    background_cpu: float
    """CPU of all other threads of the process."""


class _Schedule:
    """What the system knows of the calling thread."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read(self) -> tuple[float, float]:
        """Return seconds on a core, and seconds ready without one."""
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


def train(compute: Callable[[], object], log: Callable[[], None] | None) -> Step:
    """Compute for one step, call `log` after a second, and return what the thread lost."""
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
    return Step(
        logged=call > 0,
        longest_gap=1e3 * gap,
        longest_stall=1e3 * stall,
        call=1e3 * call,
        call_net=1e3 * call_net,
        waited=1e3 * (time.perf_counter() - begin - on_core - (ready - ready_begin)),
        iterations_per_second=iterations / on_core,
        background_cpu=1e3 * (time.process_time() - process_begin - on_core),
    )


def computation(kind: str) -> Callable[[], object]:
    """Return some computation of a training loop: 20 µs of Python, or 0.1 ms of torch on one core."""
    if kind == "python":
        return lambda: sum(number * number for number in range(400))
    import torch

    torch.set_num_threads(1)
    weights = torch.randn(192, 192)
    return lambda: torch.relu(weights @ weights)


def main() -> None:
    """Train, one step without logging and one with it in turn."""
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

        print(json.dumps(asdict(train(compute, None))), flush=True)
        print(json.dumps(asdict(train(compute, log))), flush=True)
    counters = client.counters.snapshot()
    if counters.dropped or counters.invalid or counters.accepted != 1 + 2 * STEPS:
        raise SystemExit(f"not everything was logged: {counters}")
    client.close()


if __name__ == "__main__":
    main()
