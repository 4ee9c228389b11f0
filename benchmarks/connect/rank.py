"""One rank of the launches of `benchmarks.connect.ranks`: logs its shard of each step, and notes what it logged."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import foreshock

ROLLOUTS = 3
"""Rollouts of a rank at a step."""


def main() -> None:
    """Log the steps that the plan in the first argument asks for; with a second one, in so many processes."""
    plan = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        world = int(sys.argv[2])
        spawning = multiprocessing.get_context("spawn")
        ranks = [spawning.Process(target=log_steps, args=(plan, rank, world)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(any(process.exitcode for process in ranks))
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    log_steps(plan, rank, int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"]))


def log_steps(plan: Mapping[str, Any], rank: int, world: int) -> None:
    """Log the steps of one rank."""
    journal = Path(plan["journal"]) / f"{plan['launch']}-{rank}.jsonl"
    client = foreshock.Client(
        plan["url"], run_key=plan["run_key"], spool_directory=Path(plan["journal"]) / f"spool-{rank}",
        heartbeat_seconds=1.0,
    )  # fmt: skip
    client.start_run(resume_step=plan["first"], shard=rank, shards=world)
    last_rank = rank == world - 1
    for step in range(plan["first"], plan["last"]):
        if last_rank and plan["scenario"] == "late" and step == plan["first"] + 1:
            time.sleep(plan["late_seconds"])
        if last_rank and plan["scenario"] == "killed" and step == plan["first"] + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.log_rollouts(step, rollouts(plan["launch"], rank, step))
        with journal.open("a") as file:
            file.write(json.dumps({"step": step, "rollouts": ROLLOUTS}) + "\n")
        time.sleep(plan["step_seconds"])
    if plan["finish"] and rank == 0:
        client.finish()
    client.close(60)


def rollouts(launch: int, rank: int, step: int) -> dict[str, object]:
    """Return rollouts that differ between launches, ranks and steps."""
    random = np.random.default_rng((launch, rank, step))
    behaviour = [-random.exponential(1.0, 8).astype(np.float32) for _ in range(ROLLOUTS)]
    return {
        "prompt_token_ids": [[1, 2]] * ROLLOUTS,
        "response_token_ids": [random.integers(0, 100, 8) for _ in range(ROLLOUTS)],
        "rollout_log_probs": behaviour,
        "trainer_log_probs": [np.minimum(row + np.float32(1e-3), 0) for row in behaviour],
    }


if __name__ == "__main__":
    main()
