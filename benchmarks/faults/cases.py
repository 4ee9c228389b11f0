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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.faults.case import STEPS, CannotRun, Case, CaseResult
from benchmarks.faults.catalogue import ORPHAN_GRACE_SECONDS
from benchmarks.faults.gate import Gate
from benchmarks.faults.launcher import Launcher, PlainLauncher
from benchmarks.faults.s3_cases import object_store, s3_killed, s3_refuses, s3_settings
from benchmarks.faults.served import Served
from benchmarks.faults.workload import make_batch
from foreshock.rollouts import RolloutBatch, encode_rollouts
from tests.service.postgres import PostgresCluster
from tests.service.sending import PARQUET


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
    _wait_until(lambda: case.client.counters.delivered >= 2 * STEPS, 60)
    case.expect(case.client.counters.delivered >= 2 * STEPS, "after a restart of both the poison blocks what is behind")
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


def run_cases(names: list[str], cluster: Callable[[], PostgresCluster]) -> list[CaseResult]:
    """Run the cases of these names, each with a service of its own."""
    results = []
    for name in names:
        function = CASES[name]
        result = CaseResult(name, (function.__doc__ or "").strip())
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="foreshock-fault-") as folder:
            try:
                _run(name, result, Path(folder), cluster)
            except CannotRun as error:
                result.skipped = str(error)
        result.seconds = time.monotonic() - begun
        results.append(result)
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
        s3 = object_store(folder)
        gate = Gate(s3.port)
        arguments = [s3, gate]
        settings |= s3_settings(gate.url, folder)
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


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of eight megabytes, in memory."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise CannotRun("skipped: mounting a small file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        raise CannotRun(f"skipped: {done.stderr.decode().strip()}")
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
        raise CannotRun("skipped: moving a process's clock needs a C compiler")
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
