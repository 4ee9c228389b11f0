"""The trainer that `client_kills` kills. It imports only what a trainer imports, so that a launch is short."""

from __future__ import annotations

import os
import sys
import time

from benchmarks.faults.kill_points import VARIABLE, arm
from benchmarks.faults.workload import make_batch
from foreshock import Client


def train() -> None:
    """Log the steps of one launch, then keep the client open until the standard input is closed."""
    url, spool, number, first, steps = sys.argv[1], sys.argv[2], *(int(text) for text in sys.argv[3:])
    arm(os.environ.get(VARIABLE, ""))
    client = Client(
        url, run_key="trained", attempt_key=f"launch-{number}", spool_directory=spool, timeout_seconds=5.0,
        max_memory_bytes=30_000, exit_seconds=5.0,
    )  # fmt: skip
    client.start_run(resume_step=first, model="a model")
    print("logs", flush=True)
    for step in range(first, first + steps):
        client.log_rollouts(step, make_batch(1, number, step, 0))
        client.log_scalars(step, {"grad_norm": 0.1 * step})
        time.sleep(0.03)
    if steps == 0:
        client.flush(120.0)
        client.close()
        return
    sys.stdin.read()


if __name__ == "__main__":
    train()
