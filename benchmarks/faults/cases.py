"""Faults other than kills, each with its real cause: what the service answers meanwhile, and what is stored afterwards.

A trainer logs through `foreshock.Client` before, during and after the fault, and nobody touches the service. Then every
shard must be stored once, with nothing rejected.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sqlalchemy import select

from benchmarks.faults.catalogue import ORPHAN_GRACE_SECONDS, check_catalogue
from benchmarks.faults.gate import Gate
from benchmarks.faults.launcher import Launcher, PlainLauncher
from benchmarks.faults.served import Served
from benchmarks.faults.state import note_case
from benchmarks.faults.verify import Findings, check_files
from benchmarks.faults.workload import make_batch
from foreshock import Client
from foreshock.rollouts import RolloutBatch, encode_rollouts
from service.platform.database.session import Database
from service.platform.database.tables import Shard, Step
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer, RefusingServer
from tests.service.postgres import PostgresCluster
from tests.service.sending import PARQUET

_PROBLEM = "application/problem+json"
_STEPS = 6
_FLUSH_SECONDS = 120.0


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

    def log(self, steps: int = _STEPS, rollouts: int = 8) -> None:
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


def disk_full(case: Case) -> None:
    """The token store's file system has no room."""
    store, run = case.served.store, case.other_run()
    for step in range(40):
        answer = case.upload(step, _large_body(step), run)
        if answer is not None and answer.status_code == 507:
            break
    case.expect(answer is not None and answer.status_code == 507, "a full store must be answered with 507")
    case.log()
    scalars = f"{case.served.url}/v1/runs/{run}/steps/0/scalars"
    answer = httpx.put(scalars, json={"values": {"a": 1.0}}, timeout=30)
    case.expect(answer.is_success, f"scalars need no room in the store: {answer.status_code}")
    time.sleep(3.0)
    subprocess.run(["mount", "-o", "remount,size=256m", str(store)], check=True)


def read_only_folder(case: Case) -> None:
    """The token store's folder is mounted read-only."""
    store, run = str(case.served.store), case.other_run()
    subprocess.run(["mount", "--bind", store, store], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
    try:
        answer = case.upload(0, encode_rollouts(make_batch(1, 1, 0, 0)), run)
        case.expect(answer is not None and answer.status_code == 503, "a read-only folder must be answered with 503")
        ready = httpx.get(f"{case.served.url}/readyz", timeout=30)
        case.expect(ready.status_code == 503, f"/readyz must tell it, got {ready.status_code}")
        case.log()
        time.sleep(3.0)
    finally:
        subprocess.run(["umount", store], check=True)


def decoder_killed(case: Case) -> None:
    """Decoders are killed with SIGKILL while they work."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(1.5):
            case.served.kill_decoder()
            case.result.answers["decoders killed"] += 1

    thread = threading.Thread(target=kill)
    thread.start()
    for _ in range(5):
        case.log(4)
        time.sleep(1.5)
    stop.set()
    thread.join()


def poison_shard(case: Case) -> None:
    """One shard takes longer to decode than FORESHOCK_DECODE_TIMEOUT_SECONDS, so its decoder is killed every time."""
    case.log(2)
    case.log_poison(_large_batch(0, 20_000))
    case.log()
    _wait_until(lambda: case.client.counters.delivered >= 2 * case.result.shards, 60)
    behind = case.client.counters.delivered
    case.expect(behind >= 2 * case.result.shards, f"{behind} items came past the poison, expected all others")
    case.client.close(0.5)
    case.served.kill()
    case.served.start()
    case.served.wait_until("/readyz")
    case.client = case.new_client()
    case.log()
    _wait_until(lambda: case.client.counters.delivered >= 2 * _STEPS, 60)
    case.expect(
        case.client.counters.delivered >= 2 * _STEPS, "after a restart of both the poison blocks what is behind"
    )
    # The limit is raised: the shard that was kept all the time arrives.
    case.client.close(0.5)
    case.served.kill()
    case.served.start(FORESHOCK_DECODE_TIMEOUT_SECONDS="300")
    case.served.wait_until("/readyz")
    case.client = case.new_client()


def clock_jumps_back(case: Case, clock: Path) -> None:
    """The wall clock of the service jumps back by an hour, and later forward again."""
    case.log()
    case.flush()
    run = case.other_run()
    url = f"{case.served.url}/v1/runs/{run}/steps/0/rollouts/0"
    body, headers = encode_rollouts(make_batch(3, 1, 0, 0)), {"Content-Type": PARQUET}
    # A step that lacks a shard: it closes after its grace time, whatever the clock does.
    httpx.put(url, params={"shards": 2}, content=body, headers=headers, timeout=30).raise_for_status()
    _set_clock(clock, -3600)
    case.log()
    case.flush()
    steps = f"{case.served.url}/v1/runs/{run}/steps"
    closed = _wait_until(lambda: httpx.get(steps, timeout=30).json()["items"][0]["closed"], 20)
    case.expect(closed, "a step without all shards did not close while the clock was back")
    _set_clock(clock, 0)
    case.log()


def postgresql_restarted(case: Case, cluster: PostgresCluster) -> None:
    """PostgreSQL is stopped at once (SIGQUIT), stays away for three seconds, and is started again; twice."""
    run = case.other_run()
    for number in range(2):
        case.log(3)
        cluster.crash()
        case.upload(number, encode_rollouts(make_batch(5, 1, number, 0)), run)
        case.log(3)
        time.sleep(3.0)
        live = httpx.get(f"{case.served.url}/livez", timeout=5)
        case.expect(live.is_success, "/livez must not need the database")
        cluster.start()


def postgresql_frozen(case: Case, cluster: PostgresCluster) -> None:
    """Every process of PostgreSQL is stopped (SIGSTOP) for ten seconds."""
    run = case.other_run()
    with cluster.frozen():
        case.log(3)
        threads = [
            threading.Thread(target=case.upload, args=(step, encode_rollouts(make_batch(5, 1, step, 0)), run, 60.0))
            for step in range(4)
        ]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        for _ in range(20):
            httpx.get(f"{case.served.url}/livez", timeout=5).raise_for_status()
        case.expect(time.monotonic() - begun < 4.0, "/livez is slow while PostgreSQL is frozen")
        time.sleep(8.0)
    for thread in threads:
        thread.join()


def s3_killed(case: Case, s3: ObjectStoreServer, gate: Gate) -> None:
    """The S3 server (SeaweedFS) is killed with SIGKILL, stays away for three seconds, and is started again; twice."""
    run = case.other_run()
    for number in range(2):
        case.log(3)
        s3.kill()
        answer = case.upload(number, encode_rollouts(make_batch(5, 1, number, 0)), run)
        case.expect(answer is not None and answer.status_code == 503, "a store that is away must be answered with 503")
        live = httpx.get(f"{case.served.url}/livez", timeout=5)
        case.expect(live.is_success, "/livez must not need the store")
        case.log(3)
        time.sleep(3.0)
        s3.start()


def s3_refuses(case: Case, s3: ObjectStoreServer, gate: Gate) -> None:
    """The S3 server answers every request with 403 AccessDenied, then with 503 SlowDown."""
    run = case.other_run()
    for number, (status, code) in enumerate(((403, "AccessDenied"), (503, "SlowDown"))):
        with RefusingServer(status, code) as refusing:
            gate.forward_to(int(refusing.url.rpartition(":")[2]))
            answer = case.upload(number, encode_rollouts(make_batch(5, 1, number, 0)), run)
            case.expect(answer is not None and answer.status_code == 503, f"{code} must be answered with 503")
            case.log(3)
            time.sleep(3.0)
            gate.forward_to(s3.port)
        case.log(3)
        case.flush()


def run_cases(names: list[str], cluster: Callable[[], PostgresCluster], save: Path | None = None) -> list[CaseResult]:
    """Run the cases of these names, each with a service of its own."""
    results = []
    for name in names:
        function = CASES[name]
        result = CaseResult(name, (function.__doc__ or "").strip())
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="foreshock-fault-") as folder:
            try:
                _run(name, result, Path(folder), cluster)
            except _CannotRun as error:
                result.skipped = str(error)
        result.seconds = time.monotonic() - begun
        results.append(result)
        if save is not None and not result.skipped:
            note_case(save, name, result.answers, result.findings.problems)
        print(line_of(result), flush=True)
        for text in result.findings.problems:
            print(f"  {text}", flush=True)
    return results


def line_of(result: CaseResult) -> str:
    """Return the row of a case."""
    answers = ", ".join(f"{name} × {count}" for name, count in sorted(result.answers.items()))
    outcome = result.skipped or f"{len(result.findings.problems)} problems"
    return f"{result.name:22s} {result.seconds:6.1f} s  {result.shards:3d} shards  {outcome}; {answers or 'no errors'}"


CASES: dict[str, Callable[..., None]] = {
    "disk_full": disk_full,
    "read_only_folder": read_only_folder,
    "decoder_killed": decoder_killed,
    "poison_shard": poison_shard,
    "clock_jumps_back": clock_jumps_back,
    "postgresql_restarted": postgresql_restarted,
    "postgresql_frozen": postgresql_frozen,
    "s3_killed": s3_killed,
    "s3_refuses": s3_refuses,
}
_OF_S3 = frozenset({"s3_killed", "s3_refuses"})
_OF_POSTGRESQL = frozenset({"postgresql_restarted", "postgresql_frozen"})


class _CannotRun(Exception):
    """This machine cannot produce the fault."""


def _run(name: str, result: CaseResult, folder: Path, make_cluster: Callable[[], PostgresCluster]) -> None:
    settings, clock = {"FORESHOCK_STEP_GRACE_SECONDS": "3"}, folder / "clock"
    settings |= {
        "FORESHOCK_ORPHAN_GRACE_SECONDS": str(ORPHAN_GRACE_SECONDS), "FORESHOCK_ORPHAN_SWEEP_SECONDS": "2",
    }  # fmt: skip
    arguments: list[Any] = []
    launcher: Launcher = Launcher() if name != "clock_jumps_back" else PlainLauncher()
    url = ""
    if name in _OF_POSTGRESQL:
        cluster = make_cluster()
        url = cluster.new_database()
        arguments = [cluster]
    if name in _OF_S3:
        s3 = _object_store(folder)
        gate = Gate(s3.port)
        arguments = [s3, gate]
        settings |= _s3_settings(gate.url, folder)
    if name == "poison_shard":
        settings["FORESHOCK_DECODE_TIMEOUT_SECONDS"] = "0.5"
    if name == "clock_jumps_back":
        _set_clock(clock, 0)
        settings |= {"LD_PRELOAD": str(_compiled_clock(folder)), "CLOCK_OFFSET_FILE": str(clock)}
        arguments = [clock]
    served = Served(launcher, folder / "service", url, **settings)
    try:
        with _small_disk(served.store) if name == "disk_full" else _nothing():
            if name not in _OF_S3:
                served.store.mkdir(exist_ok=True)
            served.start()
            served.wait_until("/readyz")
            case = Case(result, served, folder)
            try:
                case.log()
                case.flush()
                CASES[name](case, *arguments)
                case.log()
                case.flush()
                case.verify()
            finally:
                case.client.close(0.1)
                served.kill()
    finally:
        launcher.close()
        if name in _OF_S3:
            gate.close()
            s3.kill()


def _object_store(folder: Path) -> ObjectStoreServer:
    own = folder / "s3"
    own.mkdir()
    try:
        return ObjectStoreServer(own)
    except BaseException as error:
        # The tests skip where the program is missing.
        if type(error).__name__ in ("Skipped", "Failed"):
            raise _CannotRun(f"skipped: {error}") from None
        raise


def _s3_settings(endpoint: str, folder: Path) -> dict[str, str]:
    return {
        "FORESHOCK_STORE_URL": "s3://tokens/faults",
        "FORESHOCK_STORE_ENDPOINT": endpoint,
        "FORESHOCK_STORE_ACCESS_KEY_ID": ACCESS_KEY,
        "FORESHOCK_STORE_SECRET_ACCESS_KEY": SECRET_KEY,
        "FORESHOCK_STORE_TIMEOUT_SECONDS": "3",
        "FORESHOCK_STORE_TEMPORARY_FOLDER": str(folder / "temporary"),
    }


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of eight megabytes, in memory."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise _CannotRun("skipped: mounting a small file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        raise _CannotRun(f"skipped: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _compiled_clock(folder: Path) -> Path:
    """Compile the library that moves a process's clock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise _CannotRun("skipped: moving a process's clock needs a C compiler")
    library = folder / "clock_offset.so"
    source = Path(__file__).with_name("clock_offset.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def _large_batch(seed: int, rollouts: int) -> RolloutBatch:
    """Return rollouts of 50 tokens each whose log-probs do not compress."""
    draw, tokens = np.random.default_rng(seed), 50 * rollouts
    log_probs = -draw.random(tokens).astype(np.float32)
    return RolloutBatch.from_arrays(
        sample_ids=[f"large-{seed}-{number}" for number in range(rollouts)],
        prompt_token_ids=np.arange(rollouts, dtype=np.int32),
        prompt_offsets=np.arange(rollouts + 1),
        response_token_ids=draw.integers(0, 50_000, tokens).astype(np.int32),
        response_offsets=50 * np.arange(rollouts + 1),
        rollout_log_probs=log_probs,
        trainer_log_probs=log_probs * np.float32(1.01),
    )


def _large_body(seed: int) -> bytes:
    return encode_rollouts(_large_batch(seed, 1500))


def _set_clock(path: Path, seconds: int) -> None:
    # Replaced at once: the service reads it at every look at the clock.
    new = path.with_suffix(".new")
    new.write_text(f"{seconds:+d}\n")
    new.replace(path)


def _wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
