"""Check the jobs after the kills: in the database, in the files, and against scores that were made without kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.jobs.job_plan import BROKEN, OPTIONS, PlannedJob, rollout_sets
from benchmarks.jobs.probed_runs import rows
from benchmarks.replay import Replayer
from foreshock.rollouts import decode_scores
from foreshock_probes.engines.process import EnginePool

if TYPE_CHECKING:
    from benchmarks.jobs.__main__ import Findings

_TRIES = 3
_ATOL = 1e-5


def check_jobs(findings: Findings, database: Path, folder: Path, root: Path, planned: Sequence[PlannedJob]) -> None:
    """Check the end of every job, the scores that it published, and their values."""
    engines = EnginePool(folder / "reference")
    try:
        reference = _Reference(Replayer(folder / "reference", engines), root)
        for plan in planned:
            jobs = rows(database, "SELECT * FROM probe_jobs WHERE probe_id = ?", [plan.probe])
            if len(jobs) != 1:
                findings.problems.append(f"{plan.probe} has {len(jobs)} jobs, expected 1")
                continue
            leases = rows(database, "SELECT * FROM leases WHERE job_id = ? ORDER BY token", [jobs[0]["id"]])
            findings.states[_ended_as(jobs[0])] += 1
            findings.counts["tries"] += len(leases)
            findings.problems += _problems_of_end(plan, jobs[0], leases)
            _check_scores(findings, database, folder, plan, jobs[0], reference)
    finally:
        engines.close()


def check_store(findings: Findings, folder: Path, settings: Mapping[str, str]) -> None:
    """Run `foreshock fsck`: every row has its intact file, every file a row."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    command = [sys.executable, "-m", "foreshock.commands.main", "fsck", "--json"]
    done = subprocess.run(command, cwd=folder, env={**others, **settings}, capture_output=True, text=True, timeout=300)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"foreshock fsck failed: {done.stdout[-1000:]} {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    findings.counts["files_checked"] += sum(report["checked"].values())
    findings.problems += [f"fsck: {each['problem']}: {each['file']} {each['detail']}" for each in report["findings"]]


def _ended_as(job: Mapping[str, Any]) -> str:
    poisoned = job["state"] == "failed" and (job["reason"] or "").startswith("given up after")
    return "poisoned" if poisoned else str(job["state"])


def _problems_of_end(plan: PlannedJob, job: Mapping[str, Any], leases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the end of a job and with its tries."""
    state, found = _ended_as(job), []
    outcomes = Counter(lease["outcome"] for lease in leases)
    where = f"{job['id']} ({plan.broken or 'possible'}, {state})"
    if job["state"] not in ("done", "failed", "skipped"):
        found.append(f"{where} has not ended")
    if job["state"] != "done" and not job["reason"]:
        found.append(f"{where} has no reason")
    expected = {BROKEN[plan.broken], "poisoned"} if plan.broken else {"done", "poisoned"}
    if state not in expected and not (plan.broken == "root" and state == "poisoned"):
        found.append(f"{where} ended as {state}, expected {' or '.join(sorted(expected))}: {job['reason']}")
    if state == "poisoned" and len(json.loads(job["reasons"])) != _TRIES:
        found.append(f"{where} was given up with {len(json.loads(job['reasons']))} reasons, expected {_TRIES}")
    if [lease["token"] for lease in leases] != list(range(1, len(leases) + 1)):
        found.append(f"{where} has tokens {[lease['token'] for lease in leases]}")
    if outcomes["completed"] != (job["state"] == "done") or outcomes[None]:
        found.append(f"{where} has leases that ended as {dict(outcomes)}")
    return found


def _check_scores(
    findings: Findings, database: Path, folder: Path, plan: PlannedJob, job: Mapping[str, Any], reference: _Reference
) -> None:
    scores = rows(database, "SELECT * FROM scores WHERE job_id = ?", [job["id"]])
    expected = sorted(plan.scorers) if job["state"] == "done" else []
    if sorted(score["scorer"] for score in scores) != expected:
        findings.problems.append(f"{job['id']} ({job['state']}) has scores of {[each['scorer'] for each in scores]}")
        return
    for score in scores:
        files = rows(
            database,
            "SELECT file FROM score_shards WHERE job_id = ? AND token = ? AND scorer = ? AND variant = ?",
            [job["id"], score["token"], score["scorer"], score["variant"]],
        )
        if len(files) != 1 or score["token"] != job["fencing_token"]:
            findings.problems.append(f"{job['id']} published try {score['token']} with {len(files)} files")
            continue
        stored = decode_scores((folder / "service" / "foreshock-data" / "tokens" / files[0]["file"]).read_bytes())
        wanted = reference.of(plan, score["scorer"])
        same = stored.log_probs.shape == wanted.shape
        findings.counts["scores_checked"] += 1
        findings.counts["scores_equal_bit_for_bit"] += same and bool(np.array_equal(stored.log_probs, wanted))
        if not same or not np.allclose(stored.log_probs, wanted, rtol=0, atol=_ATOL):
            findings.problems.append(f"{job['id']}: the log-probs of {score['scorer']} are not those without kills")


class _Reference:
    """Log-probs that were made without a service and without kills, each set once."""

    def __init__(self, replay: Replayer, root: Path) -> None:
        self._replay, self._root, self._sets = replay, root, rollout_sets()
        self._known: dict[tuple[str, str, int], NDArray[np.float32]] = {}

    def of(self, plan: PlannedJob, scorer: str) -> NDArray[np.float32]:
        """Return the log-probs [T] of a job's rollouts."""
        key = (scorer, plan.checkpoint, plan.rollouts)
        if key not in self._known:
            batch = self._sets[plan.rollouts]
            self._known[key], _ = self._replay.score(
                batch, self._root / plan.checkpoint, scorer, **OPTIONS.get(scorer, {})
            )
        return self._known[key]
