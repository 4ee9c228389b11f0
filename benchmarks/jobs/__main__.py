"""Kill probe workers at random while they do jobs, then check every job. `make bench-jobs`

Three workers run: two of torch, one of vLLM. Whenever one is seen with a lease, it is drawn whether something is done
to it, and when: SIGKILL of the worker, SIGKILL of its engine, or SIGSTOP until its lease has expired and another worker
has done the job (`stale_writes.py`). A killed worker is replaced. The first torch workers that are seen with a lease
are frozen in any case, until three leases were lost in this way. The bar: every job ends as done, skipped or failed
with a reason, `outcomes.py` finds no score lost, doubled or changed, and each request with a lost lease is refused.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.jobs.job_plan import TORCH, VLLM, PlannedJob, make_checkpoints, plan_jobs, runs_for
from benchmarks.jobs.outcomes import check_jobs, check_store
from benchmarks.jobs.probed_runs import ProbedRun, rows
from benchmarks.jobs.stale_writes import LATE_REQUESTS, HeldLease, check_refused
from benchmarks.jobs.workers import WorkerProcess
from benchmarks.running_service import running_service

LEASE_SECONDS = 4.0
_ENDED_STATES = ("done", "failed", "skipped")
_ENDED = str(_ENDED_STATES)
_LOST = "freeze worker until its lease is lost"
_PATIENCE_SECONDS = 180.0
# Shares of leases in which something is done to a worker; a vLLM engine takes half a minute to start again.
_SHARE = {"torch": 0.4, "vllm": 0.3}
_LATEST_SECONDS = 0.6
# Leases that are lost in every run, whatever is drawn.
_LOST_LEASES = 3
_WHAT = {"kill worker": 0.6, "kill engine": 0.25, "freeze worker": 0.15}
_SETTINGS = {
    "FORESHOCK_LEASE_SECONDS": str(LEASE_SECONDS),
    "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
    "FORESHOCK_TOKEN_PASS": "numpy",
    "FORESHOCK_DECODE_PROCESSES": "1",
}


@dataclass(slots=True)
class Findings:
    """What was done, how jobs ended, and every problem."""

    done: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Run the kills and print what was found; return 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    arguments = parser.parse_args()
    jobs, begun = arguments.jobs, time.monotonic()
    draw, findings = random.Random(arguments.seed), Findings()
    with tempfile.TemporaryDirectory(prefix="foreshock-kills-") as name:
        folder = Path(name)
        root = folder / "weights"
        make_checkpoints(root)
        for each in ("service", "workers", "reference"):
            (folder / each).mkdir()
        with (
            running_service(folder / "service", **_SETTINGS) as url,
            httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as http,
        ):
            runs = [ProbedRun.start(http, root) for _ in range(runs_for(jobs))]
            planned = plan_jobs(draw, jobs, runs)
            campaign = _Campaign(http, folder, draw, findings, len(planned))
            with _workers(url, root, folder / "workers") as workers:
                campaign.run(workers)
            check_jobs(findings, campaign.database, folder, root, planned)
        check_store(findings, folder / "service", _SETTINGS)
    _print(findings, planned)
    counted = {name.replace(" ", "_"): str(count) for name, count in sorted(findings.done.items())}
    ended = {f"jobs_{state}": str(count) for state, count in sorted(findings.states.items())}
    figures = {"jobs": str(jobs), **counted, **ended, **{name: str(n) for name, n in sorted(findings.counts.items())}}
    figures |= {"problems": str(len(findings.problems)), "seconds": f"{time.monotonic() - begun:.0f}"}
    print(*(f"{name}={value}" for name, value in figures.items()))
    return 1 if findings.problems else 0


@contextmanager
def _workers(url: str, root: Path, folder: Path) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        made = []
        for label, scorers in (("torch-a", TORCH), ("torch-b", TORCH), ("vllm", VLLM)):
            made.append(WorkerProcess(label, url, root, folder, scorers))
            stack.callback(made[-1].close)
        yield made


class _Campaign:
    """Watches the leases of the workers and ends or freezes workers."""

    def __init__(self, http: httpx.Client, folder: Path, draw: random.Random, findings: Findings, jobs: int) -> None:
        self.database = folder / "service" / "foreshock-data" / "foreshock.db"
        self._http, self._draw, self._findings, self._jobs = http, draw, findings, jobs
        self._seen: set[str] = set()

    def run(self, workers: list[WorkerProcess]) -> None:
        """Go on until all jobs have ended. Raises RuntimeError if none ends for three minutes."""
        self._work_off(workers)
        lost = self._findings.done[_LOST]
        if lost < _LOST_LEASES:
            self._findings.problems.append(f"{lost} leases were lost, expected at least {_LOST_LEASES}")

    def _work_off(self, workers: list[WorkerProcess]) -> None:
        ended, since, shown = 0, time.monotonic(), 0
        while ended < self._jobs:
            for worker in workers:
                if not worker.alive:
                    worker.start()
                lease = self._new_lease(worker)
                if lease is None:
                    continue
                engine = worker.name.partition("-")[0]
                if engine == "torch" and self._findings.done[_LOST] < _LOST_LEASES:
                    self._findings.done[self._freeze(worker, lease)] += 1
                elif self._draw.random() < _SHARE[engine]:
                    self._disturb(worker, lease)
            now = self._ended()
            if now > ended:
                ended, since = now, time.monotonic()
            if ended >= shown + 20:
                shown = ended
                print(
                    f"{time.strftime('%H:%M:%S')} {ended} of {self._jobs} jobs; {dict(self._findings.done)}", flush=True
                )
            if time.monotonic() - since > _PATIENCE_SECONDS:
                raise RuntimeError(f"no job ended for {_PATIENCE_SECONDS:g} s: {self._open()}")
            time.sleep(0.02)

    def _new_lease(self, worker: WorkerProcess) -> HeldLease | None:
        """Return the lease of a worker if it was not seen before."""
        found = rows(
            self.database,
            "SELECT id, lease_id, fencing_token FROM probe_jobs WHERE state = 'running' AND worker = ?",
            [worker.name],
        )
        if not found or found[0]["lease_id"] in self._seen:
            return None
        self._seen.add(found[0]["lease_id"])
        return HeldLease(found[0]["id"], found[0]["lease_id"], found[0]["fencing_token"])

    def _disturb(self, worker: WorkerProcess, lease: HeldLease) -> None:
        time.sleep(self._draw.uniform(0.0, _LATEST_SECONDS))
        what = self._draw.choices(list(_WHAT), list(_WHAT.values()))[0]
        if what == "kill worker":
            what = self._kill(worker, lease)
        elif what == "kill engine":
            what = what if worker.kill_engine() else "no engine yet"
        elif worker.name.startswith("vllm"):
            what = self._kill(worker, lease)  # no other worker offers its scorer, so that none could take the job
        else:
            what = self._freeze(worker, lease)
        self._findings.done[what] += 1

    def _kill(self, worker: WorkerProcess, lease: HeldLease) -> str:
        """Kill the worker and return whether it had the job."""
        worker.kill()
        (job,) = rows(self.database, "SELECT lease_id FROM probe_jobs WHERE id = ?", [lease.job])
        return "kill worker in a job" if job["lease_id"] == lease.lease else "kill worker after a job"

    def _freeze(self, worker: WorkerProcess, lease: HeldLease) -> str:
        """Freeze the worker until another has the job, then let it go on; return what was done."""
        worker.freeze()
        deadline = time.monotonic() + 10 * LEASE_SECONDS
        while time.monotonic() < deadline:
            (job,) = rows(self.database, "SELECT state, fencing_token FROM probe_jobs WHERE id = ?", [lease.job])
            # Queued with the same token: the lease has expired, and no successor has the job yet.
            if job["fencing_token"] == lease.token and job["state"] in _ENDED_STATES:
                worker.thaw()
                return "freeze worker after a job"  # it had just ended the job
            if job["fencing_token"] > lease.token and job["state"] in _ENDED_STATES:
                break
            time.sleep(0.05)
        else:
            worker.thaw()
            return "freeze worker, no successor"
        before = self._scores(lease.job)
        accepted = check_refused(self._http, lease)
        self._findings.problems += accepted
        self._findings.counts["late_requests_refused"] += LATE_REQUESTS - len(accepted)
        worker.thaw()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while "dropped, lease lost" not in worker.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        if "dropped, lease lost" not in worker.log.read_text():
            self._findings.problems.append(f"{worker.name} did not drop the job {lease.job} that it had lost")
        else:
            self._findings.counts["late_workers_that_dropped_the_job"] += 1
        if self._scores(lease.job) != before:
            self._findings.problems.append(f"the scores of {lease.job} changed after its late worker went on")
        return _LOST

    def _scores(self, job: str) -> list[dict[str, object]]:
        return rows(self.database, "SELECT * FROM scores WHERE job_id = ? ORDER BY scorer, variant", [job])

    def _ended(self) -> int:
        found = rows(self.database, f"SELECT count(*) AS number FROM probe_jobs WHERE state IN {_ENDED}")
        return int(found[0]["number"])

    def _open(self) -> list[dict[str, object]]:
        return rows(self.database, f"SELECT id, state, needs, worker FROM probe_jobs WHERE state NOT IN {_ENDED}")


def _print(findings: Findings, planned: list[PlannedJob]) -> None:
    broken = sum(bool(job.broken) for job in planned)
    print(f"\n{len(planned)} jobs, of which {broken} have a checkpoint that is missing or refused")
    for title, counted in (("done to workers", findings.done), ("ends of jobs", findings.states)):
        print(f"{title}:")
        for name, count in counted.most_common():
            print(f"  {name:34s}{count:6d}")
    for name, count in sorted(findings.counts.items()):
        print(f"{name.replace('_', ' '):36s}{count:6d}")
    print(
        f"lost leases: {findings.done[_LOST]} workers were frozen beyond their lease while a successor ended the job; "
        f"{findings.counts['late_requests_refused']} of {LATE_REQUESTS * findings.done[_LOST]} late requests refused"
    )
    for text in findings.problems:
        print(f"PROBLEM {text}")


if __name__ == "__main__":
    sys.exit(main())
