"""Failures of the service: its disk, its database, its judge, and what it is asked."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from sqlalchemy import event
from sqlalchemy.orm import Session

from benchmarks.failures.disks import small_disk
from benchmarks.failures.rows import Outcome, Row
from benchmarks.running_service import running_service, wait_until
from foreshock import Client
from foreshock.client import deliveries
from foreshock.client.deliveries import Registration
from foreshock.learning_rate.decisions import AdviceState, Decision
from foreshock.notary.compare import Holding
from foreshock.notary.pieces import Piece
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.compression import zstd
from foreshock_service.platform.database.engine import insert_rows, table_of
from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import AdviceDecision, FoldedAdvice
from foreshock_service.platform.settings import Settings
from foreshock_service.watch.advice import service as advice
from tests.service.server import RunningServer
from tests.service.watch.notifications.receiver import Receiver

_PARQUET = {"Content-Type": "application/vnd.apache.parquet"}
_BLOCK_BYTES, _PAGE_BYTES = 1 << 20, 4096


@contextmanager
def _service(**settings: str) -> Iterator[tuple[Path, httpx.Client]]:
    """Start a service that looks at once, in a folder of its own; yield the folder, and a client of its address."""
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-failures-") as name,
        running_service(Path(name), FORESHOCK_SWEEP_INTERVAL_SECONDS="0.5", **settings) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        yield Path(name), http


def _batch(rollouts: int, tokens: int, seed: int = 0) -> RolloutBatch:
    """Return rollouts of `tokens` tokens each, with both log-probs."""
    random = np.random.default_rng(seed)
    behaviour = -random.exponential(1.0, rollouts * tokens).astype(np.float32)
    target = np.minimum(behaviour + random.normal(0, 0.05, behaviour.size), 0.0).astype(np.float32)
    return RolloutBatch.from_arrays(
        sample_ids=[f"{seed}-{number}" for number in range(rollouts)],
        prompt_token_ids=np.zeros(rollouts, np.int32),
        prompt_offsets=np.arange(rollouts + 1),
        response_token_ids=random.integers(0, 30_000, behaviour.size).astype(np.int32),
        response_offsets=np.arange(rollouts + 1) * tokens,
        rollout_log_probs=behaviour,
        trainer_log_probs=target,
    )


def _start(http: httpx.Client, key: str, **columns: object) -> str:
    """Register a run with one attempt; return the path of the run."""
    run = http.post("/v1/runs", json={"key": key, **columns}).raise_for_status().json()["id"]
    http.post(f"/v1/runs/{run}/attempts", json={"key": "start"}).raise_for_status()
    return f"/v1/runs/{run}"


def _target(receiver: Receiver, **fields: object) -> str:
    """Return FORESHOCK_NOTIFICATIONS with one target, which is told about everything."""
    target = {"name": "team", "url": f"json://{receiver.host}/hook", "severity": "info", "resolved": True}
    return json.dumps([target | fields])


def _alerts(http: httpx.Client, run: str, rule: str) -> list[dict[str, Any]]:
    return [each for each in http.get(f"{run}/alerts").raise_for_status().json()["items"] if each["rule"] == rule]


def _full_disk_during_upload() -> Outcome:
    body = encode_rollouts(_batch(64, 6_000))
    with small_disk(16 << 20) as disk, _service(FORESHOCK_STORE_URL=str(disk / "tokens")) as (folder, http):
        run, filling = _start(http, "full"), disk / "filling"

        def leave(room: int) -> None:
            """Leave the disk `room` bytes, rounded to pages."""
            filling.unlink(missing_ok=True)
            filling.write_bytes(bytes((16 << 20) - max(_PAGE_BYTES, room // _PAGE_BYTES * _PAGE_BYTES)))

        def files() -> int:
            return sum(path.is_file() for path in (disk / "tokens").rglob("*"))

        answers = []
        for number in range(64):
            # Each body is another number of bytes longer than the disk's room, up to two blocks.
            leave(len(body) - 1 - number * (2 * _BLOCK_BYTES // 64))
            answer = http.put(f"{run}/steps/{number}/rollouts/0", content=body, headers=_PARQUET)
            answers.append((answer.status_code, files()))
        with Client(str(http.base_url), run_key="real", spool_directory=folder / "spool") as client:
            client.log_rollouts(1, _batch(64, 6_000, seed=1))
            was_waiting = client.flush(5.0).undelivered
            filling.unlink()
            status = client.flush(90.0)
    full = answers.count((507, 0))
    seen = f"507 and no file at {full} of 64 offsets; then {status}"
    return Outcome(seen, full == 64 and was_waiting > 0 and status.complete)


_DYING = """
import sys, time
from benchmarks.failures.service_rows import _batch
from foreshock import Client

client = Client(sys.argv[1], run_key="dying", attempt_key="launch", spool_directory=sys.argv[2], heartbeat_seconds=0.5)
client.start_run(shard=0, shards=2)
client.log_rollouts(1, _batch(4, 50))
client.flush(60)
time.sleep(600)
"""


def _killed_trainer() -> Outcome:
    with (
        closing(Receiver()) as receiver,
        _service(
            FORESHOCK_STALE_SECONDS="5",
            FORESHOCK_STEP_GRACE_SECONDS="8",
            FORESHOCK_NOTIFICATIONS=_target(receiver),
        ) as (folder, http),
    ):
        run = _start(http, "dying")
        arguments = [sys.executable, "-c", _DYING, str(http.base_url), str(folder / "spool")]
        trainer = subprocess.Popen(arguments)
        wait_until(lambda: bool(http.get(f"{run}/steps").json()["items"]), 60)
        trainer.kill()
        trainer.wait()
        closed = wait_until(lambda: bool(http.get(f"{run}/steps").json()["items"][0]["closed"]), 60)
        silent = wait_until(lambda: bool(_alerts(http, run, "stale_run")), 60)
        # A retraction would be told within two rounds.
        wait_until(lambda: False, 6)
        states = [each["state"] for each in _alerts(http, run, "stale_run")]
        titles = [body["title"] for body in receiver.bodies if "stale_run" in body["title"]]
    ended = sum(title.startswith("resolved") for title in titles)
    seen = f"step closed: {closed}; alerts {states}, {len(titles)} told, {ended} as ended"
    return Outcome(seen, closed and silent and states == ["open"] and len(titles) == 1 and not ended)


_SCALARS = """
import sys, time
from foreshock import Client

client = Client(sys.argv[1], run_key="silent", spool_directory=sys.argv[2], heartbeat_seconds=0.5)
client.start_run()
for step in range(100_000):
    client.log_scalars(step, {"reward": 0.5})
    time.sleep(0.5)
"""


def _three_silences() -> Outcome:
    with (
        closing(Receiver()) as receiver,
        _service(FORESHOCK_STALE_SECONDS="4", FORESHOCK_NOTIFICATIONS=_target(receiver)) as (folder, http),
    ):
        arguments = [sys.executable, "-c", _SCALARS, str(http.base_url), str(folder / "spool")]
        trainer = subprocess.Popen(arguments)

        def told(change: str) -> int:
            return sum(body["title"].startswith(f"{change}: stale_run") for body in receiver.bodies)

        try:
            wait_until(lambda: bool(http.get("/v1/runs").json()["items"]), 60)
            for silence in range(1, 4):
                wait_until(lambda: False, 1)
                trainer.send_signal(signal.SIGSTOP)
                wait_until(partial(lambda wanted: told("warning") >= wanted, silence), 30)
                trainer.send_signal(signal.SIGCONT)
                wait_until(partial(lambda wanted: told("resolved") >= wanted, silence), 30)
        finally:
            trainer.kill()
            trainer.wait()
    seen = f"{told('warning')} told, {told('resolved')} ended"
    return Outcome(seen, told("warning") == told("resolved") == 3)


def _dropped_verdict() -> Outcome:
    with (
        closing(Receiver()) as receiver,
        _service(FORESHOCK_NOTIFICATIONS=_target(receiver, verdicts=True, resolved=False)) as (_, http),
    ):
        run = _start(http, "warned")

        def lose(items: int) -> None:
            http.put(f"{run}/attempts/1/clients/a", json={"dropped": items}).raise_for_status()

        def told() -> int:
            return sum(body["title"] == "warning: warned" for body in receiver.bodies)

        # The target refuses, and the verdict is obsolete when the message is sent again.
        receiver.answers = [500] * 4
        lose(1)
        wait_until(lambda: told() > 0, 30)
        refused = told()
        (alert,) = _alerts(http, run, "client_losses")
        http.post(f"{run}/alerts/{alert['id']}/resolve").raise_for_status()
        receiver.answers = []
        wait_until(lambda: False, 15)
        obsolete = told() - refused
        lose(2)
        wait_until(lambda: told() > refused + obsolete, 30)
        again = told() - refused - obsolete
    return Outcome(
        f"refused {refused}, sent while obsolete {obsolete}, told again {again}", (obsolete, again) == (0, 1)
    )


_MISMATCHED = 24


def _mismatched(step: int) -> bytes:
    """Return rollouts of which π is far from μ from step `_MISMATCHED` / 2 on."""
    batch = _batch(16, 40, seed=step)
    if step > _MISMATCHED // 2:
        batch = replace(batch, trainer_log_probs=np.roll(np.asarray(batch.rollout_log_probs), 1))
    return encode_rollouts(batch)


def _upgraded_database() -> Outcome:
    with closing(Receiver()) as receiver, tempfile.TemporaryDirectory(prefix="foreshock-failures-") as name:
        folder, database = Path(name), Path(name, "f.db")
        settings = {"FORESHOCK_DATABASE_URL": f"sqlite:///{database}", "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5"}
        with running_service(folder, **settings) as url, httpx.Client(base_url=url, timeout=120) as http:
            runs = [_start(http, f"run {number}") for number in range(4)]
            for run in runs:
                for step in range(_MISMATCHED):
                    http.put(f"{run}/steps/{step}/rollouts/0", content=_mismatched(step), headers=_PARQUET)
                if run != runs[-1]:
                    http.patch(run, json={"state": "finished"}).raise_for_status()
        ids = [run.rpartition("/")[2] for run in runs]
        with closing(sqlite3.connect(database)) as connection, connection:
            # An earlier release stored other states, found nothing in two of the runs, and judged them healthy.
            connection.execute("UPDATE detector_snapshots SET configuration_digest = 'older'")
            older = "UPDATE detector_snapshots SET state = ? WHERE run_id IN (?, ?)"
            connection.execute(older, (zstd.compress(b'{"release": 0}'), ids[0], ids[1]))
            connection.execute("UPDATE diagnoses SET judged_by = 'older'")
            healthy = "UPDATE diagnoses SET verdict = 'healthy' WHERE run_id IN (?, ?)"
            connection.execute(healthy, (ids[0], ids[3]))
            connection.execute("DELETE FROM alerts WHERE run_id IN (?, ?)", (ids[0], ids[3]))
            kept = connection.execute("SELECT * FROM alerts ORDER BY id").fetchall()
        settings["FORESHOCK_NOTIFICATIONS"] = _target(receiver, verdicts=True)
        with running_service(folder, **settings) as url, httpx.Client(base_url=url, timeout=120) as http:
            # The running run is judged again.
            wait_until(lambda: bool(http.get(f"{runs[3]}/alerts").json()["items"]), 60)
            wait_until(lambda: False, 10)
        with closing(sqlite3.connect(database)) as connection:
            found = connection.execute("SELECT * FROM alerts WHERE run_id != ? ORDER BY id", (ids[3],)).fetchall()
            running = connection.execute("SELECT count(*) FROM alerts WHERE run_id = ?", (ids[3],)).fetchone()[0]
    opened = len({row[0] for row in found} - {row[0] for row in kept})
    changed = len(set(kept) - set(found))
    told = len(receiver.requests)
    seen = f"{opened} opened, {changed} changed of {len(kept)}, {told} sent; in a running run {running} opened, quietly"
    return Outcome(seen, (opened, changed, told) == (0, 0, 0) and bool(kept) and running > 0)


def _append_decisions(database: Database, runs: Sequence[str], number: int) -> None:
    """Append decisions of the control loop to the first run, one a step, and copy them to the others."""

    def work(session: Session) -> None:
        state = AdviceState()
        for step in range(1, number + 1):
            scale = 0.5 + 0.4 * math.cos(step)
            decision = Decision(
                step, 1, "loop", step - 1, step, "The loop moves.", 0, scale=scale, fall=0.001, loop_reference=0.0
            )
            state = advice.append(session, runs[0], state, decision)
        for table in (table_of(AdviceDecision), table_of(FoldedAdvice)):
            rows = session.execute(table.select().where(table.c.run_id == runs[0])).mappings().all()
            insert_rows(session, table, [{**row, "run_id": run} for run in runs[1:] for row in rows])

    database.write(work)


def _scrape_of_decisions() -> Outcome:
    with tempfile.TemporaryDirectory(prefix="foreshock-failures-") as name:
        folder, settings = Path(name), {"FORESHOCK_DATABASE_URL": f"sqlite:///{name}/f.db"}
        with running_service(folder, **settings) as url, httpx.Client(base_url=url, timeout=120) as http:
            runs = [_start(http, f"run {number}") for number in range(50)]
            for run in runs:
                http.put(f"{run}/steps/0/rollouts/0", content=encode_rollouts(_batch(4, 20)), headers=_PARQUET)
        with closing(Database(settings["FORESHOCK_DATABASE_URL"])) as database:
            _append_decisions(database, [run.rpartition("/")[2] for run in runs], 500)
        with running_service(folder, **settings) as url, httpx.Client(base_url=url, timeout=120) as http:
            process = next(child for child in psutil.Process().children() if "serve" in child.cmdline())

            def cpu_seconds(requests: int) -> float:
                before = process.cpu_times()
                for _ in range(requests):
                    http.get("/metrics").raise_for_status()
                after = process.cpu_times()
                return after.user + after.system - before.user - before.system

            cpu_seconds(5)
            milliseconds = cpu_seconds(20) / 20 * 1e3
            shown = http.get("/metrics").text.count("foreshock_advice_revision{")
    return Outcome(f"{milliseconds:.0f} ms for {shown} runs", milliseconds <= 80 and shown == 50)


def _one_rank_of_512() -> Outcome:
    with _service(FORESHOCK_STEP_GRACE_SECONDS="3") as (_, http):
        run = _start(http, "wide")

        def headline() -> str:
            return str(http.get(f"{run}/diagnosis").raise_for_status().json()["headline"])

        for step in range(20):
            query = {"shards": 512}
            http.put(
                f"{run}/steps/{step}/rollouts/0", params=query, content=encode_rollouts(_batch(4, 20)), headers=_PARQUET
            )
        waiting = headline()
        wait_until(lambda: "sent nothing in all 20 steps" in headline(), 60)
        closed = headline()
    return Outcome(
        f"{len(waiting)} characters while it waits, then {len(closed)}: {closed}",
        max(len(waiting), len(closed)) <= 200 and "sent nothing in all 20 steps" in closed,
    )


def _tokens_without_scores() -> Outcome:
    with _service() as (_, http):
        run, batch = _start(http, "unscored"), _batch(512, 4_000)
        body = encode_rollouts(replace(batch, rollout_log_probs=None, trainer_log_probs=None))
        http.put(f"{run}/steps/0/rollouts/0", content=body, headers=_PARQUET).raise_for_status()
        begun = time.perf_counter()
        status = http.get(f"{run}/steps/0/tokens", params={"worst": 5}).status_code
        seconds = time.perf_counter() - begun
    return Outcome(f"{status} after {seconds:.2f} s", status == 404 and seconds < 1)


def _key_of_the_form_of_an_id() -> Outcome:
    with _service() as (_, http):
        key = _start(http, "first").rpartition("/")[2]
        answer = http.post("/v1/runs", json={"key": key})
    return Outcome(f"{answer.status_code}: {answer.json()['detail']}", answer.status_code == 422)


def _late_older_launch() -> Outcome:
    with _service() as (_, http):
        run = _start(http, "late")
        older = {"key": "older", "age_seconds": 3600}
        for attempt, steps in ((1, 6), (2, 3)):
            if attempt == 2:
                http.post(f"{run}/attempts", json=older).raise_for_status()
            for step in range(steps):
                body = encode_rollouts(_batch(4, 40, seed=10 * attempt + step))
                query = {"attempt": attempt}
                http.put(f"{run}/steps/{step}/rollouts/0", params=query, content=body, headers=_PARQUET)
        wanted = {"comparison": "trainer/rollout", "measure": "k3_kl"}
        columns = http.get(f"{run}/measurements", params=wanted).json()["columns"]
        lines = http.get("/metrics").text.splitlines()
        metrics = {
            line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "trainer/rollout" in line
        }
        shown = next(float(line.rpartition(" ")[2]) for line in lines if line.startswith("foreshock_step{"))
    api, exported = (columns["step"][-1], columns["k3_kl"][-1]), (int(shown), metrics["foreshock_k3_kl_nats"])
    return Outcome(
        f"API k3 {api[1]:.4g} at step {api[0]}, metrics {exported[1]:.4g} at step {exported[0]}", api == exported
    )


def _writer_under_the_notary() -> Outcome:
    parts = [Piece("bfloat16", (7 * rank + 3) ** 9 % 2**64, 1, 64, row=rank, rank=rank) for rank in range(4096)]
    places = list(range(4096))
    places[17], places[4000] = places[4000], places[17]
    parts_of = {"w": parts}
    swapped_of = {"w": [part._replace(row=place) for part, place in zip(parts, places, strict=True)]}
    many = {f"model.layers.{number}.weight": [Piece("bfloat16", 10**9 + number, 8, 8)] for number in range(100_000)}
    other = {**many, "model.layers.7.weight": [Piece("bfloat16", 3, 8, 8)]}
    held: list[float] = []
    with tempfile.TemporaryDirectory(prefix="foreshock-failures-") as name:
        url = f"sqlite:///{name}/f.db"
        upgrade(url)
        app = create_app(Settings(database_url=url, store_url=f"{name}/tokens", token_pass="numpy"))
        writing = app.state.context.database._write_engine
        # CPU time of the writer's thread: on a busy machine it also waits for a core.
        event.listen(writing, "begin", lambda connection: connection.info.update(begun=time.thread_time()))
        event.listen(writing, "commit", lambda connection: held.append(time.thread_time() - connection.info["begun"]))
        with RunningServer(app) as server, httpx.Client(base_url=server.url, timeout=300) as http:
            run = _start(http, "notary")
            registration = Registration({"project": "default", "key": "notary"}, {"key": "start"})
            one, another = {"w": parts[:1]}, {"w": parts[1:2]}
            # The first step compiles the statements.
            for step, (said, report) in enumerate(((one, another), (parts_of, swapped_of), (many, other))):
                if step == 1:
                    held.clear()
                delivery = deliveries.weights(registration, step, Holding(said), {"0": Holding(report)}, {}, 1)
                address = f"{run}/steps/{step}/weights"
                http.put(address, content=bytes(delivery.body), headers=_PARQUET).raise_for_status()
            found = [each["verdict"]["wrong"] for each in http.get(f"{run}/weights").json()["items"]]
    how = [[each["how"] for each in wrong] for wrong in found]
    longest = max(held) * 1e3
    ok = how[1:] == [["swapped"], ["unknown"]] and longest <= 50
    return Outcome(f"found {how[1:]}, writer held at most {longest:.0f} ms", ok)


def _unreadable_state() -> Outcome:
    with tempfile.TemporaryDirectory(prefix="foreshock-failures-") as name:
        database = Path(name, "f.db")
        settings = {"FORESHOCK_DATABASE_URL": f"sqlite:///{database}", "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5"}
        with running_service(Path(name), **settings) as url, httpx.Client(base_url=url, timeout=120) as http:
            runs = [_start(http, key) for key in ("before", "bad", "after")]
            for run in runs:
                for step in range(4):
                    http.put(f"{run}/steps/{step}/rollouts/0", content=_mismatched(step), headers=_PARQUET)
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE detector_snapshots SET configuration_digest = 'older'")
            bad = runs[1].rpartition("/")[2]
            for table, column in (
                ("detector_snapshots", "state"),
                ("folded_advice", "state"),
                ("diagnoses", "document"),
            ):
                connection.execute(f"UPDATE {table} SET {column} = '[\"unreadable\"]' WHERE run_id = ?", (bad,))
        with running_service(Path(name), **settings) as url, httpx.Client(base_url=url, timeout=120) as http:
            begun = time.perf_counter()

            def derived() -> bool:
                with closing(sqlite3.connect(database)) as connection:
                    query = (
                        "SELECT count(DISTINCT run_id) FROM detector_snapshots WHERE configuration_digest != 'older'"
                    )
                    return int(connection.execute(query).fetchone()[0]) == 3

            all_derived = wait_until(derived, 30)
            seconds = time.perf_counter() - begun
            answers = [
                http.put(f"{run}/steps/4/rollouts/0", content=_mismatched(4), headers=_PARQUET).status_code
                for run in runs
            ]
            metrics = http.get("/metrics").status_code
    seen = (
        f"all derived: {all_derived}, {seconds:.1f} s after the service is ready; uploads {answers}, metrics {metrics}"
    )
    return Outcome(seen, all_derived and seconds <= 2 and answers == [201] * 3 and metrics == 200)


ROWS: list[Row] = [
    Row(
        "full-disk-during-upload",
        "507 at each of 64 offsets in the last two blocks, no file left; delivered later",
        _full_disk_during_upload,
    ),
    Row("killed-in-a-sharded-step", "one alert of silence opened and told, none ended", _killed_trainer),
    Row("three-silences", "a run of scalars is silent three times: three told, three ended", _three_silences),
    Row("dropped-verdict", "a verdict that was obsolete before it was sent is told when it returns", _dropped_verdict),
    Row(
        "upgraded-database",
        "earlier judge, finished runs, a target: 0 opened, 0 retracted, 0 sent",
        _upgraded_database,
    ),
    Row("scrape-of-decisions", "50 runs of 500 decisions: a scrape takes at most 80 ms of CPU", _scrape_of_decisions),
    Row("one-rank-of-512", "the headline has at most 200 characters, and names ranks", _one_rank_of_512),
    Row("tokens-without-scores", "2 M tokens without log-probs: 404 within a second", _tokens_without_scores),
    Row("key-of-the-form-of-an-id", "refused with a sentence", _key_of_the_form_of_an_id),
    Row("late-older-launch", "API and metrics show the same newest step", _late_older_launch),
    Row(
        "writer-under-the-notary", "4,096 parts, 100,000 tensors: judged, writer held ≤ 50 ms", _writer_under_the_notary
    ),
    Row("unreadable-state", "a bad run between two healthy ones: derived within 2 s, uploads 201", _unreadable_state),
]
