"""Does a step cost more in a long run, and how fast is the example's recorded run logged? `make bench-steps`.

1. Time to close step n through HTTP: one upload of the recorded rollouts of a step (128 rollouts), in runs of n = 100,
   1,000 and 10,000 steps, on SQLite and on PostgreSQL, both with durable commits. The service is the real one, in its
   own process. Sizes are interleaved, one upload at a time. Runs are copies of an ingested one
   (benchmarks/step_rows.py); before they are used, the rows of a copied run of 100 steps are compared with those of a
   run of the same 100 steps that was uploaded.
2. The 160 recorded steps, rollouts and scalars, logged through foreshock.Client to a new service on SQLite: from the
   first call to the end of `flush`. Medians of REPEATS.
3. The same for SMALL_STEPS steps of 8 rollouts × 20 tokens with the recorded scalars, as closed steps per second: what
   a step costs whatever its size. No bar.

Bars: median at 10,000 steps ≤ 1.3 × median at 100 on both databases; 160 steps in under 6 s on two idle cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks.recorded_runs import SHIPPED
from benchmarks.running_service import running_service
from benchmarks.step_rows import comparable, copy_run
from foreshock import Client
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock_service.platform.database.session import Database
from tests.service.postgres import PostgresCluster

BAR_RATIO, BAR_SECONDS = 1.3, 6.0
# Steps → runs of so many steps: each takes SAMPLES / runs more, so that its length hardly changes.
SIZES = {100: 15, 1_000: 3, 10_000: 1}
SAMPLES = 300
WARM_UP = 30
# The copied run repeats so many recorded steps.
PERIOD = 50
CHECKED_STEPS = 100
REPEATS = 3
SMALL_STEPS, SMALL_ROLLOUTS, SMALL_TOKENS = 200, 8, 20
PARQUET = "application/vnd.apache.parquet"


@dataclass
class GrowingRun:
    """A run that is uploaded to, step by step."""

    http: httpx.Client
    run: str
    next_step: int = 0

    @classmethod
    def start(cls, http: httpx.Client, key: str) -> GrowingRun:
        run = http.post("/v1/runs", json={"key": key}).raise_for_status().json()["id"]
        http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}).raise_for_status()
        return cls(http, run)

    def close_step(self, recording: Recording) -> float:
        """Upload the rollouts of the next step, which closes it; the seconds that this took."""
        body = recording.bodies[self.next_step % PERIOD]
        path = f"/v1/runs/{self.run}/steps/{self.next_step}/rollouts/0"
        begin = time.perf_counter()
        answer = self.http.put(path, content=body, headers={"Content-Type": PARQUET})
        seconds = time.perf_counter() - begin
        assert answer.raise_for_status().json()["step_closed"]
        return seconds

    def put_scalars(self, recording: Recording) -> None:
        """Report the scalars of the step that was closed, as trainers do, and go to the next one."""
        values = recording.scalars[self.next_step % PERIOD]
        path = f"/v1/runs/{self.run}/steps/{self.next_step}/scalars"
        self.http.put(path, json={"values": values}).raise_for_status()
        self.next_step += 1


@dataclass(frozen=True)
class Recording:
    """The recorded run that ships with the repository: uploads and scalars of its steps, in order."""

    bodies: list[bytes] = field(default_factory=list)
    scalars: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def read(cls) -> Recording:
        bodies = [path.read_bytes() for path in sorted((SHIPPED / "rollouts").glob("step_*.parquet"))]
        lines = (SHIPPED / "metrics.jsonl").read_text().splitlines()
        scalars = [
            {name: float(value) for name, value in json.loads(line).items() if name != "step" and value is not None}
            for line in lines
        ]
        return cls(bodies, scalars)

    def batches(self) -> list[RolloutBatch]:
        return [decode_rollouts(body) for body in self.bodies]


@contextmanager
def database_urls() -> Iterator[dict[str, str]]:
    """The databases to measure: a SQLite file beside the service, and a PostgreSQL cluster that syncs its commits."""
    cluster = PostgresCluster(Path(tempfile.mkdtemp(prefix="fsk-pg-", dir="/tmp")), durable=True)
    try:
        yield {"sqlite": "", "postgresql": cluster.new_database()}
    finally:
        cluster.stop()


def close_times(recording: Recording, url: str) -> dict[int, list[float]]:
    """Steps of the run → seconds to close one more step."""
    with tempfile.TemporaryDirectory(prefix="foreshock-steps-") as folder:
        url = url or f"sqlite:///{folder}/foreshock.db"
        with (
            running_service(Path(folder), FORESHOCK_DATABASE_URL=url) as address,
            httpx.Client(base_url=address, timeout=300) as http,
        ):
            database = Database(url)
            template = GrowingRun.start(http, "ingested")
            for _ in range(CHECKED_STEPS):
                template.close_step(recording)
                template.put_scalars(recording)
            check_copy(database, http, template)
            runs = {steps: list(_copied(database, http, template, steps, count)) for steps, count in SIZES.items()}
            database.close()
            times: dict[int, list[float]] = {steps: [] for steps in SIZES}
            for number in range(WARM_UP + SAMPLES):
                for steps, copies in runs.items():
                    run = copies[number % len(copies)]
                    seconds = run.close_step(recording)
                    run.put_scalars(recording)
                    if number >= WARM_UP:
                        times[steps].append(seconds)
            return times


def check_copy(database: Database, http: httpx.Client, template: GrowingRun) -> None:
    """Raise AssertionError unless a copied run of CHECKED_STEPS has the rows of the run that was ingested."""
    copy = GrowingRun.start(http, "checked")
    copy_run(database, template.run, PERIOD, copy.run, CHECKED_STEPS)
    ingested, copied = comparable(database, template.run), comparable(database, copy.run)
    for table, rows in ingested.items():
        assert copied[table] == rows, f"a copied run has other rows in {table} than an ingested one"
    counts = ", ".join(f"{len(rows)} {table}" for table, rows in ingested.items() if rows)
    print(f"a copied run has the rows of an ingested one: {counts}", flush=True)


def _copied(
    database: Database, http: httpx.Client, template: GrowingRun, steps: int, count: int
) -> Iterator[GrowingRun]:
    for number in range(count):
        run = GrowingRun.start(http, f"{steps} steps, {number}")
        copy_run(database, template.run, PERIOD, run.run, steps)
        run.next_step = steps
        yield run


def small_recording(recording: Recording) -> tuple[list[RolloutBatch], list[dict[str, float]]]:
    """Return SMALL_STEPS steps of random rollouts, with the recorded scalars in turn."""
    random = np.random.default_rng(0)
    tokens = SMALL_ROLLOUTS * SMALL_TOKENS
    batches = []
    for _ in range(SMALL_STEPS):
        log_probs = -random.exponential(0.5, tokens).astype(np.float32)
        batches.append(
            RolloutBatch.from_arrays(
                [f"rollout-{number}" for number in range(SMALL_ROLLOUTS)],
                prompt_offsets=np.arange(SMALL_ROLLOUTS + 1),
                prompt_token_ids=random.integers(0, 1000, SMALL_ROLLOUTS),
                response_offsets=np.arange(SMALL_ROLLOUTS + 1) * SMALL_TOKENS,
                response_token_ids=random.integers(0, 1000, tokens),
                rollout_log_probs=log_probs,
                trainer_log_probs=np.minimum(log_probs + random.normal(0.0, 0.01, tokens), 0.0).astype(np.float32),
                reward=random.random(SMALL_ROLLOUTS).astype(np.float32),
            )
        )
    return batches, [recording.scalars[number % len(recording.scalars)] for number in range(SMALL_STEPS)]


def seconds_to_log(batches: list[RolloutBatch], scalars: list[dict[str, float]]) -> float:
    """Log a run, rollouts and scalars, to a new service: seconds from the first call to the end of flush."""
    with tempfile.TemporaryDirectory(prefix="foreshock-steps-") as folder, running_service(Path(folder)) as address:
        with Client(url=address, run_key="recorded", spool_directory=Path(folder) / "spool") as client:
            client.start_run(name="recorded")
            begin = time.perf_counter()
            for step, (batch, values) in enumerate(zip(batches, scalars, strict=True), start=1):
                client.log_rollouts(step, batch)
                client.log_scalars(step, values)
            client.flush(300)
            seconds = time.perf_counter() - begin
            assert client.counters.delivered == 2 * len(batches) + 1, client.counters
        return seconds


def percentile_99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def print_table(times: Mapping[str, Mapping[int, list[float]]]) -> dict[str, float]:
    """Print milliseconds by database and steps; the ratio of medians by database."""
    print(f"\n{'database':12s} {'steps':>7s} {'median ms':>10s} {'p99 ms':>8s} {'ratio':>6s}")
    ratios = {}
    for database, by_steps in times.items():
        shortest = statistics.median(by_steps[min(by_steps)])
        for steps, seconds in by_steps.items():
            median = statistics.median(seconds)
            ratios[database] = median / shortest
            print(
                f"{database:12s} {steps:7,d} {1e3 * median:10.2f} {1e3 * percentile_99(seconds):8.2f} "
                f"{ratios[database]:6.2f}"
            )
    return ratios


def main() -> int:
    recording = Recording.read()
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    batches, small = recording.batches(), small_recording(recording)
    logged = [seconds_to_log(batches, recording.scalars) for _ in range(REPEATS)]
    small_rate = SMALL_STEPS / statistics.median(seconds_to_log(*small) for _ in range(REPEATS))
    with database_urls() as urls:
        times = {name: close_times(recording, url) for name, url in urls.items()}
    ratios = print_table(times)
    each = ", ".join(f"{seconds:.2f} s" for seconds in logged)
    print(f"\n{len(recording.bodies)} recorded steps through foreshock.Client: {each}")
    print(f"{SMALL_ROLLOUTS} rollouts of {SMALL_TOKENS} tokens a step: {small_rate:.1f} steps/s closed")
    seconds = statistics.median(logged)
    reached = seconds < BAR_SECONDS and all(ratio <= BAR_RATIO for ratio in ratios.values())
    pairs = [f"{name}_ratio={ratio:.3f}" for name, ratio in ratios.items()]
    for name, by_steps in times.items():
        pairs += [f"{name}_median_ms_{steps}={1e3 * statistics.median(found):.2f}" for steps, found in by_steps.items()]
    pairs += [f"recorded_seconds={seconds:.2f}", f"small_steps_per_second={small_rate:.1f}"]
    print(*pairs, f"reached={str(reached).lower()}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
