"""One case of a fault: its service, a trainer that logs to it through the client, and what must hold afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import select

from benchmarks.faults.catalogue import check_catalogue
from benchmarks.faults.served import Served
from benchmarks.faults.verify import Findings, check_files
from benchmarks.faults.workload import make_batch
from foreshock import Client
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Shard, Step
from tests.service.sending import PARQUET

_PROBLEM = "application/problem+json"
STEPS = 6
_FLUSH_SECONDS = 120.0


class CannotRun(Exception):
    """This machine cannot produce the fault."""


@dataclass(slots=True)
class CaseResult:
    """What happened in one case. `answers` counts the answers to uploads while the fault held."""

    name: str
    cause: str
    answers: Counter[str] = field(default_factory=Counter)
    shards: int = 0
    seconds: float = 0.0
    findings: Findings = field(default_factory=Findings)
    skipped: str = ""


class Case:
    """A service, and a trainer that logs to it through the client; the parts that every case uses."""

    def __init__(self, result: CaseResult, served: Served, folder: Path) -> None:
        self.result, self.served, self._folder = result, served, folder
        self._step = 0
        self.poison = 0
        self.client = self.new_client()

    def new_client(self) -> Client:
        """Return a client with the case's spool."""
        client = Client(
            self.served.url, run_key="trained", spool_directory=self._folder / "spool", timeout_seconds=10.0,
            exit_seconds=1.0, attempt_key="first",
        )  # fmt: skip
        client.start_run(model="a model")
        return client

    def log(self, steps: int = STEPS, rollouts: int = 8) -> None:
        """Log steps of one shard, with their scalars."""
        for _ in range(steps):
            self.client.log_rollouts(self._step, make_batch(7, 1, self._step, 0, rollouts))
            self.client.log_scalars(self._step, {"grad_norm": 1.0})
            self._step += 1
            self.result.shards += 1

    def log_poison(self, batch: RolloutBatch) -> None:
        """Log a step of one shard without scalars."""
        self.client.log_rollouts(self._step, batch)
        self._step += 1
        self.poison = 1

    def flush(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Wait until everything is delivered; note what is not."""
        status = self.client.flush(seconds)
        if not status.complete:
            self.result.findings.problem("undelivered", str(status))

    def upload(self, step: int, body: bytes, run: str, timeout: float = 30.0) -> httpx.Response | None:
        """Upload a shard beside the client, count the answer, and check that an error tells when to come back."""
        url = f"{self.served.url}/v1/runs/{run}/steps/{step}/rollouts/0"
        try:
            answer = httpx.put(url, content=body, headers={"Content-Type": PARQUET}, timeout=timeout)
        except httpx.HTTPError as error:
            self.result.answers[type(error).__name__] += 1
            return None
        self.result.answers[str(answer.status_code)] += 1
        if answer.is_error:
            self.result.answers[f"{answer.status_code} {answer.json().get('title', '?')}"] += 1
            if answer.headers["Content-Type"] != _PROBLEM or "Retry-After" not in answer.headers:
                self.result.findings.problem(
                    "unclear", f"{answer.status_code} {dict(answer.headers)} {answer.text[:200]}"
                )
        return answer

    def other_run(self, key: str = "beside") -> str:
        """Register a run for uploads beside the client."""
        run: str = (
            httpx.post(f"{self.served.url}/v1/runs", json={"key": key}, timeout=30).raise_for_status().json()["id"]
        )
        body = {"key": "first"}
        httpx.post(f"{self.served.url}/v1/runs/{run}/attempts", json=body, timeout=30).raise_for_status()
        return run

    def expect(self, condition: bool, text: str) -> None:
        """Note a problem unless the condition holds."""
        if not condition:
            self.result.findings.problem("unexpected", text)

    def verify(self) -> None:
        """Check that the client's shards are stored once, that their steps are closed, and the files."""
        self.client.close(1.0)
        rejected = list((self._folder / "spool").rglob("rejected/*.body"))
        self.expect(not rejected, f"{len(rejected)} items were rejected")
        run = httpx.get(f"{self.served.url}/v1/runs", timeout=30).json()["items"]
        trained = next(each["id"] for each in run if each["key"] == "trained")
        database = Database(self.served.database_url)
        try:
            with database.read() as session:
                shards = session.scalars(select(Shard).where(Shard.run_id == trained)).all()
                steps = session.scalars(select(Step).where(Step.run_id == trained)).all()
            if {row.step for row in shards} != set(range(self._step)) or len(shards) != self._step:
                missing = sorted(set(range(self._step)) - {row.step for row in shards})
                self.result.findings.problem("lost", f"{len(shards)} of {self._step} shards; missing {missing}")
            for step in steps:
                self.expect(step.received_shards == 1 and step.closed_at_us is not None, f"step {step.step} is open")
            if self.served.store.exists():
                check_files(self.result.findings, database, self.served.store)
        finally:
            database.close()
        check_catalogue(self.result.findings, self.served)
