"""Part `ranks` of `make bench-connect`: no rollout of several ranks is lost without an alert, and none counts twice.

    python -m benchmarks.connect.ranks [--processes 2 4 8] [--launchers …] [--scenarios …]

Real processes log to the real service. The launchers are torchrun on one node, torchrun on two nodes with
`--master_addr` (its run id is then "none"; both agents run on this machine), `multiprocessing`, and the variables that
srun sets. The scenarios:

    plain     every rank logs every step
    late      one rank logs a step after its grace time is over
    killed    one rank is killed by SIGKILL at its third step; torchrun then ends all ranks, at once on one node
    restart   all ranks stop without finishing, and start again from a checkpoint two steps before

Each rank writes down what it logged. `lost` counts those rollouts that no active step holds, unless an alert is there;
`twice` those that active steps hold beyond what was logged. Exits 1 unless both are 0 everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.running_service import free_port, running_service

LAUNCHERS = ("torchrun", "torchrun static", "multiprocessing", "srun variables")
SCENARIOS = ("plain", "late", "killed", "restart")
PROCESSES = (2, 4, 8)
STEPS = 5
GRACE_SECONDS = 2.0
LATE_SECONDS = 5.0
# A process that is killed within milliseconds of its start has told the service nothing.
STEP_SECONDS = 0.5
# Clients give a sign of life each second.
STALE_SECONDS = 20.0
SETTINGS = {
    "FORESHOCK_STEP_GRACE_SECONDS": str(GRACE_SECONDS),
    "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
    "FORESHOCK_STALE_SECONDS": str(STALE_SECONDS),
    "FORESHOCK_TOKEN_PASS": "numpy",
}
ALERTS = ("split_ranks", "incomplete_step", "client_losses", "stale_run")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rollouts of one run: logged by its ranks and not superseded, held by active steps, and what that says."""

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


def main() -> int:
    """Run the chosen combinations and print the table; return 1 if a rollout is lost or counts twice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    chosen = parser.parse_args()
    found = run(chosen.processes, chosen.launchers, chosen.scenarios)
    print(*(f"{name}={value:.0f}" for name, value in found.items()), f"passed={reached(found)}")
    return 0 if reached(found) else 1


def reached(found: dict[str, float]) -> bool:
    """Return True if no rollout is lost or counts twice, and each launch is one attempt."""
    return found["ranks_cases"] > 0 and not any(value for name, value in found.items() if name != "ranks_cases")


def run(
    processes_of: Sequence[int] = PROCESSES, launchers: Sequence[str] = LAUNCHERS, scenarios: Sequence[str] = SCENARIOS
) -> dict[str, float]:
    """Print the table of all combinations; return the cases, and the sums over them."""
    lost = twice = cases = wrong_attempts = 0
    columns = f"{'logged':>8}{'held':>6}{'lost':>6}{'twice':>7}{'attempts':>10}"
    print(f"{'launcher':16}{'scenario':10}{'ranks':>6}{columns}  alerts")
    with tempfile.TemporaryDirectory() as name, running_service(Path(name), **SETTINGS) as url:
        for launcher in launchers:
            for scenario in scenarios:
                for processes in processes_of:
                    found = _case(url, Path(name), launcher, scenario, processes)
                    cases += 1
                    lost, twice = lost + found.lost, twice + found.twice
                    wrong_attempts += found.attempts != (2 if scenario == "restart" else 1)
                    print(
                        f"{launcher:16}{scenario:10}{processes:6}{found.logged:8}{found.held:6}{found.lost:6}"
                        f"{found.twice:7}{found.attempts:10}  {', '.join(found.alerts) or 'none'}",
                        flush=True,
                    )
    return {
        "ranks_cases": cases, "lost_without_alert": lost, "counted_twice": twice, "wrong_attempts": wrong_attempts
    }  # fmt: skip


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
        # A resume supersedes what was logged from its first step on.
        logged = {step: count for step, count in logged.items() if step < first}
        for path in journal.glob(f"{number}-*.jsonl"):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                logged[entry["step"]] = logged.get(entry["step"], 0) + entry["rollouts"]
    # Steps without all shards close after the grace time; a run that nobody finished becomes stale.
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
    """Start the ranks and wait for their end; `killed`: one of them will be."""
    prefixes = ("SLURM", "TORCHELASTIC", "MASTER", "RANK", "WORLD", "FORESHOCK")
    base = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    base |= {"OMP_NUM_THREADS": "1"}
    program = ["-m", "benchmarks.connect.rank", plan]
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
        # The agents of other nodes wait for minutes at their exit barrier; a cluster's launcher ends them.
        while all(process.poll() is None for process in started):
            time.sleep(0.1)
        for process in started:
            process.terminate()
    for process in started:
        _, errors = process.communicate(timeout=600)
        if process.returncode != 0 and not killed:
            raise RuntimeError(f"a launch ended with status {process.returncode}: {errors[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
