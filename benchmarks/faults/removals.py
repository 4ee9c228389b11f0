"""Kill the service while it deletes a run, and purges the tokens of another.

Each round uploads two small runs, deletes one while the other is purged, and kills the service again and again until
they are done. Then no row or file may hold removed data, the other data must read as before, and every measurement of
the remaining run must be unchanged.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, select

from benchmarks.faults.served import Served
from benchmarks.faults.verify import ORPHAN_GRACE_SECONDS, Findings, Totals, check_catalogue
from benchmarks.faults.workload import make_batch
from benchmarks.running_service import wait_until, wait_until_advanced
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock_service.platform.database.tables import FileRemoval, Shard
from tests.service.sending import start_run

_STEPS, _SHARDS, _KEPT_STEPS = 8, 2, 2
_DONE_SECONDS = 60.0
KILLS_A_ROUND = 12
_SETTINGS = {
    "FORESHOCK_REMOVAL_GRACE_SECONDS": "0",
    "FORESHOCK_RETENTION_INTERVAL_SECONDS": "0.3",
    "FORESHOCK_RETENTION_LAST_STEPS": str(_KEPT_STEPS),
    "FORESHOCK_RETENTION_ALERT_STEPS": "0",
    "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.3",
    "FORESHOCK_ORPHAN_GRACE_SECONDS": str(ORPHAN_GRACE_SECONDS),
}


def kill_removals(totals: Totals, *, database_url: str, most: int, seed: int) -> None:
    """Kill the service `most` times in all, while it removes data."""
    with tempfile.TemporaryDirectory(prefix="foreshock-faults-") as name:
        served = Served(Path(name) / "service", database_url, **_SETTINGS)
        served.start()
        served.wait_until("/readyz")
        try:
            while totals.done < most:
                _Round(totals, served, f"{seed}-{totals.runs}", most).run()
                totals.runs += 1
                check_catalogue(totals.findings, served)
                print(
                    f"{time.strftime('%H:%M:%S')} removals    round {totals.runs:3d} (all {totals.done:4d}/{most}), "
                    f"problems {len(totals.findings.problems)}",
                    flush=True,
                )
        finally:
            served.kill()


class _Round:
    """Two runs, their removals, and the kills meanwhile."""

    def __init__(self, totals: Totals, served: Served, name: str, most: int) -> None:
        self._totals, self._served, self._name, self._most = totals, served, name, most
        self._findings: Findings = totals.findings
        self._draw = random.Random(name)
        self._runs: dict[str, str] = {}
        self._batches: dict[tuple[str, int, int], RolloutBatch] = {}

    def run(self) -> None:
        """Upload, remove under kills, and verify."""
        for what in ("deleted", "purged"):
            self._upload(what)
        before = self._measurements()
        asked = threading.Thread(target=self._ask)
        asked.start()
        for number in range(min(KILLS_A_ROUND, self._most - self._totals.done)):
            time.sleep(self._draw.uniform(0.0, 0.6))
            self._served.kill()
            self._totals.kills["while removing"] += 1
            self._served.start()
            # Every fourth kill comes while the service still starts.
            if number % 4:
                self._served.wait_until()
        asked.join()
        self._served.wait_until("/readyz")
        if not wait_until(self._is_done, _DONE_SECONDS):
            self._findings.problem("not_removed", f"{self._name}: removals are not done after {_DONE_SECONDS:.0f} s")
            return
        self._verify(before)

    def _upload(self, what: str) -> None:
        with httpx.Client(base_url=self._served.url, timeout=60) as http:
            run = start_run(http, f"{what}-{self._name}")
            self._runs[what] = run.run
            for step in range(_STEPS):
                for shard in range(_SHARDS):
                    batch = make_batch(self._draw.randrange(2**31), 1, step, shard)
                    self._batches[what, step, shard] = batch
                    run.put_shard(step, batch, shard, _SHARDS).raise_for_status()
            wait_until_advanced(http, run.run)

    def _ask(self) -> None:
        """Request the deletion until it is acknowledged."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.delete(self._url("deleted"), timeout=10)
                # 410: the run is already deleted, and the first answer was lost.
                if answer.is_success or answer.status_code == 410:
                    self._findings.counts["acknowledged_removals"] += 1
                    return
            time.sleep(0.05)

    def _is_done(self) -> bool:
        with self._served.database() as database, database.read() as session:
            waiting = session.scalar(
                select(func.count()).select_from(FileRemoval).where(FileRemoval.reason != "orphan")
            )
            of_deleted = select(func.count()).select_from(Shard).where(Shard.run_id == self._runs["deleted"])
            purged = select(func.count()).select_from(Shard).where(Shard.run_id == self._runs["purged"])
            purged = purged.where(Shard.tokens_purged_at_us.is_not(None))
            gone = (_STEPS - _KEPT_STEPS) * _SHARDS
            return not waiting and not session.scalar(of_deleted) and session.scalar(purged) == gone

    def _verify(self, before: Any) -> None:
        if httpx.get(self._url("deleted"), timeout=30).status_code != 410:
            self._findings.problem("not_removed", f"{self._name}: the deleted run is not 410")
        with self._served.database() as database, database.read() as session:
            rows = session.scalars(select(Shard).where(Shard.run_id.in_(self._runs.values()))).all()
        of_run = {run: what for what, run in self._runs.items()}
        for row in rows:
            what, path = of_run[row.run_id], self._served.store / row.file
            kept = list(map(str, self._batches[what, row.step, row.shard].sample_ids))
            if row.step < _STEPS - _KEPT_STEPS:
                if path.exists():
                    self._findings.problem("not_removed", f"{self._name}: the purged file {row.file} is still there")
                continue
            found = list(map(str, decode_rollouts(path.read_bytes()).sample_ids)) if path.exists() else []
            self._findings.counts["files_read"] += 1
            if found != kept:
                self._findings.problem("removed_too_much", f"{self._name}: {what} {row.step}/{row.shard}: {found}")
        self._findings.counts["rows_checked"] += len(rows)
        self._findings.counts["measurements_compared"] += 1
        if self._measurements() != before:
            self._findings.problem("mismatches", f"{self._name}: measurements of the purged run changed")

    def _measurements(self) -> Any:
        answer = httpx.get(f"{self._url('purged')}/measurements", params={"comparison": "trainer/rollout"}, timeout=30)
        return answer.raise_for_status().json()["columns"]

    def _url(self, what: str) -> str:
        return f"{self._served.url}/v1/runs/{self._runs[what]}"
