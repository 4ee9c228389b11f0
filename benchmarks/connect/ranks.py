"""Part `ranks` of `make bench-connect`: no rollout of several ranks is lost without an alert, and none counts twice.

    python -m benchmarks.connect ranks

Real processes log to the real service. The launchers are torchrun on one node, torchrun on two nodes with
`--master_addr` (its run id is then "none"; both agents run on this machine), `multiprocessing`, and the variables that
srun sets. The scenarios:

    plain     every rank logs every step
    late      one rank logs a step after its grace time is over
    killed    one rank is killed by SIGKILL at its third step; torchrun then ends all ranks, at once on one node
    restart   all ranks stop without finishing, and start again from a checkpoint two steps before

Each rank records what it logged. `lost` counts the rollouts that no active step holds, unless there is an alert;
`twice` counts the rollouts that active steps hold beyond the logged ones. Exits 1 unless both are 0 everywhere.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import foreshock
from benchmarks.bars import Line
from benchmarks.running_service import running_service
from tests.ports import free_port

LAUNCHERS = ("torchrun", "torchrun static", "multiprocessing", "srun variables")
SCENARIOS = ("plain", "late", "killed", "restart")
PROCESSES = (2, 4, 8)
STEPS = 5
ROLLOUTS = 3
"""Rollouts per rank and step."""
GRACE_SECONDS = 2.0
LATE_SECONDS = 5.0
# Long enough that a killed process has already reported to the service.
STEP_SECONDS = 0.5
# Clients send a sign of life every second.
STALE_SECONDS = 20.0
SETTINGS = {
    "FORESHOCK_STEP_GRACE_SECONDS": str(GRACE_SECONDS),
    "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
    "FORESHOCK_STALE_SECONDS": str(STALE_SECONDS),
    "FORESHOCK_TOKEN_PASS": "numpy",
}
ALERTS = ("incomplete_step", "client_losses", "stale_run")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rollouts of one run: logged by its ranks and not superseded, and held by active steps; attempts and alerts."""

    logged: int
    held: int
    attempts: int
    alerts: tuple[str, ...]

    @property
    def lost(self) -> int:
        """Return the rollouts that are missing without an alert."""
        return 0 if self.alerts else max(0, self.logged - self.held)

    @property
    def twice(self) -> int:
        """Return the rollouts that count more than once."""
        return max(0, self.held - self.logged)


def run() -> list[Line]:
    """Print the table of all combinations; return the cases, and the sums over them."""
    lost = twice = cases = wrong_attempts = 0
    columns = f"{'logged':>8}{'held':>6}{'lost':>6}{'twice':>7}{'attempts':>10}"
    print(f"{'launcher':16}{'scenario':10}{'ranks':>6}{columns}  alerts")
    with tempfile.TemporaryDirectory() as name, running_service(Path(name), **SETTINGS) as url:
        for launcher in LAUNCHERS:
            for scenario in SCENARIOS:
                for processes in PROCESSES:
                    found = _case(url, Path(name), launcher, scenario, processes)
                    cases += 1
                    lost, twice = lost + found.lost, twice + found.twice
                    wrong_attempts += found.attempts != (2 if scenario == "restart" else 1)
                    print(
                        f"{launcher:16}{scenario:10}{processes:6}{found.logged:8}{found.held:6}{found.lost:6}"
                        f"{found.twice:7}{found.attempts:10}  {', '.join(found.alerts) or 'none'}",
                        flush=True,
                    )
    return [
        Line("ranks_cases", "combinations of launchers, scenarios and ranks", cases, 1, at_least=True),
        Line("lost_without_alert", "rollouts lost without an alert", lost, 0),
        Line("counted_twice", "rollouts counted twice", twice, 0),
        Line("wrong_attempts", "launches of another number of attempts", wrong_attempts, 0),
    ]


def _case(url: str, folder: Path, launcher: str, scenario: str, processes: int) -> Outcome:
    run_key = f"{launcher} {scenario} {processes}".replace(" ", "-")
    journal = folder / run_key
    journal.mkdir()
    launches = [(0, STEPS)] if scenario != "restart" else [(0, 4), (2, 2 + STEPS)]
    logged: dict[int, int] = {}
    for number, (first, last) in enumerate(launches):
        plan = {
            "url": url, "run_key": run_key, "journal": str(journal), "scenario": scenario, "launch": number,
            "first": first, "last": last, "late_seconds": LATE_SECONDS,
            "step_seconds": STEP_SECONDS, "finish": number == len(launches) - 1,
        }  # fmt: skip
        _launch(launcher, processes, number, json.dumps(plan), killed=scenario == "killed")
        # A resume supersedes everything logged from its first step on.
        logged = {step: count for step, count in logged.items() if step < first}
        for path in journal.glob(f"{number}-*.jsonl"):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                logged[entry["step"]] = logged.get(entry["step"], 0) + entry["rollouts"]
    # Steps without all shards close after the grace time; an unfinished run becomes stale.
    time.sleep((STALE_SECONDS if scenario == "killed" else GRACE_SECONDS) + 2.0)
    with httpx.Client(base_url=url, timeout=60) as http:
        address = f"/v1/runs/{run_key}"
        if http.get(address).status_code == httpx.codes.NOT_FOUND:
            return Outcome(sum(logged.values()), 0, 0, ())
        steps: list[dict[str, Any]] = http.get(f"{address}/steps", params={"limit": 200}).json()["items"]
        attempts = http.get(f"{address}/attempts").json()["items"]
        rules = {alert["rule"] for alert in http.get(f"{address}/alerts").json()["items"]
                 if alert["rule"] in ALERTS and alert["state"] in ("open", "acknowledged")}  # fmt: skip
    held = sum(step["rollouts"] for step in steps if step["closed"])
    return Outcome(sum(logged.values()), held, len(attempts), tuple(sorted(rules)))


def _launch(launcher: str, processes: int, restart: int, plan: str, *, killed: bool) -> None:
    """Start the ranks and wait for their end; `killed`: one of them will be killed."""
    prefixes = ("SLURM", "TORCHELASTIC", "MASTER", "RANK", "WORLD", "FORESHOCK")
    base = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    base |= {"OMP_NUM_THREADS": "1"}
    program = ["-m", "benchmarks.connect.ranks", plan]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if launcher == "torchrun":
        commands = [([*torchrun, "--standalone", f"--nproc-per-node={processes}", *program], base)]
    elif launcher == "torchrun static":
        port = free_port()
        options = [
            "--nnodes=2",
            f"--nproc-per-node={processes // 2}",
            "--master_addr=127.0.0.1",
            f"--master_port={port}",
        ]
        commands = [([*torchrun, *options, f"--node_rank={node}", *program], base) for node in range(2)]
    elif launcher == "multiprocessing":
        commands = [([sys.executable, *program, str(processes)], base)]
    else:
        job = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restart), "SLURM_NTASKS": str(processes),
               "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": str(processes),
               "SLURM_STEP_ID": str(restart)}  # fmt: skip
        commands = [
            ([sys.executable, *program], {**base, **job, "SLURM_PROCID": str(rank)}) for rank in range(processes)
        ]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command, environment in commands
    ]
    if killed and launcher == "torchrun static":
        # The agents of other nodes would wait for minutes at their exit barrier; a cluster's launcher ends them.
        while all(process.poll() is None for process in started):
            time.sleep(0.1)
        for process in started:
            process.terminate()
    for process in started:
        _, errors = process.communicate(timeout=600)
        if process.returncode != 0 and not killed:
            raise RuntimeError(f"a launch ended with status {process.returncode}: {errors[-2000:]}")


def be_a_rank() -> None:
    """Log the steps of the plan in the first argument; the second argument, if given, is the number of processes."""
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
    be_a_rank()
