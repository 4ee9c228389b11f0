"""Failures of what runs in the trainer: the client, its spool, its integrations, and what they send."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from benchmarks.broken_service import serve
from benchmarks.failures.disks import fill, small_disk
from benchmarks.failures.rows import Outcome, Row
from benchmarks.failures.trainers import run_trainer
from benchmarks.running_service import running_service, wait_until
from foreshock.client.reader import Reader
from foreshock.rollouts import decode_rollouts
from tests.ports import free_port
from tests.pythons import environment_of, found_pythons
from tests.tls import self_signed

# With a service fewer, as it takes each of them.
_ITEMS, _SERVED_ITEMS = 2_000, 300
_EXIT_ITEMS = 40


def _full_disk(*, is_served: bool) -> Outcome:
    """Log to a spool on a disk that is full before the client starts."""
    program = """
        import json, os, sys
        from foreshock import Client
        client = Client(sys.argv[1], run_key="full", spool_directory=sys.argv[2], max_queue_items=5000)
        before = len(os.listdir("/proc/self/fd"))
        for step in range(int(sys.argv[3])):
            client.log_scalars(step, {"reward": 1.0})
        client.flush(200 if sys.argv[4] == "True" else 5)
        with open(os.devnull):
            print(json.dumps([len(os.listdir("/proc/self/fd")) - before - 1, client.counters.delivered]))
    """
    items = _SERVED_ITEMS if is_served else _ITEMS
    with tempfile.TemporaryDirectory() as folder, small_disk(64 << 10) as disk:
        fill(disk)
        away = nullcontext(f"http://127.0.0.1:{free_port()}")
        with running_service(Path(folder)) if is_served else away as url:
            more, delivered = run_trainer(program, url, disk, str(items), str(is_served))
        left = len(list(disk.iterdir())) - 1
    # The start of the run is an item too. A connection has one or two descriptors.
    is_ok = more <= 4 and left == 0 and delivered == (items + 1 if is_served else 0)
    return Outcome(f"{more:+} descriptors, {left} folders left, {delivered:,} items delivered", is_ok)


def _exit_on_each_python() -> Outcome:
    """Log a backlog and end: what is left is delivered while the interpreter ends, by one Python after another."""
    program = """
        import sys
        from foreshock import Client
        client = Client(sys.argv[1], run_key=sys.argv[2], spool_directory=sys.argv[3], exit_seconds=120.0)
        for step in range(int(sys.argv[4])):
            client.log_scalars(step, {"reward": 1.0})
    """
    arrived: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as url:
        for version in found_pythons():
            python = str(environment_of(version))
            run_trainer(program, url, version, f"{folder}/spool-{version}", str(_EXIT_ITEMS), python=python)
            values = _measured(url, version, "reward")
            arrived[version] = values.count(1.0)
    seen = ", ".join(f"{version}: {count}" for version, count in arrived.items())
    return Outcome(seen, all(count == _EXIT_ITEMS for count in arrived.values()))


def _measured(url: str, key: str, scalar: str) -> list[float]:
    """Return the values of a scalar that arrived in the run of a key."""
    with Reader(url) as reader:
        (run,) = reader.runs(key=key)
        return [float(value) for value in reader.scalars(run.id, names=[scalar]).columns["value"]]


def _tls() -> Outcome:
    """Wait for services that answer nothing, or a byte now and then: until the deadline, and until an interrupt."""
    program = """
        import json, sys, threading, time
        from foreshock.client.connection import ServiceConnection
        from foreshock.errors import ServiceError
        begin, interrupt = time.monotonic(), float(sys.argv[2])
        with ServiceConnection(sys.argv[1], timeout_seconds=float(sys.argv[3])) as connection:
            threading.Timer(interrupt, connection.interrupt).start()
            try:
                connection.get_json("/v1/runs")
            except ServiceError:
                print(json.dumps(time.monotonic() - begin))
            finally:
                import os
                sys.stdout.flush()
                os._exit(0)
    """
    longest, seen = 0.0, []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        tls, certificate = self_signed(Path(folder))
        patch.setenv("SSL_CERT_FILE", str(certificate))
        for name, interrupt, timeout in (("deadline", "100", "3"), ("interrupt", "3", "30")):
            for kind in ("silent", "headers a byte at a time", "body a byte at a time"):
                plain, encrypted = (
                    float(run_trainer(program, serve(kind, each)[1], interrupt, timeout)) for each in (None, tls)
                )
                longest = max(longest, encrypted / plain)
                seen.append(f"{name}, {kind}: {plain:.2f} / {encrypted:.2f} s")
    return Outcome(f"{longest:.2f} × ({'; '.join(seen)})", longest <= 1.2)


def _restart() -> Outcome:
    """End a run and start it again in the same process, as a notebook does."""
    program = """
        import sys, time
        from foreshock import Client
        client = Client(sys.argv[1], run_key="again", spool_directory=sys.argv[2], heartbeat_seconds=0.5)
        for attempt in range(2):
            client.start_run(resume_step=attempt, shard=0, shards=1)
            client.log_scalars(attempt, {"reward": 1.0})
            client.flush(60)
            time.sleep(5)
            if not attempt:
                client.finish()
                client.flush(60)
        client.close()
    """
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/runs.db"
        with running_service(Path(folder), FORESHOCK_DATABASE_URL=f"sqlite:///{database}") as url:
            run_trainer(program, url, f"{folder}/spool")
            with Reader(url) as reader:
                (run,) = reader.runs(key="again")
                begin = next(each.created_at_us for each in reader.attempts(run.id) if each.attempt == 2)
        with closing(sqlite3.connect(database)) as connection:
            ((seen,),) = connection.execute("SELECT max(seen_at_us) FROM attempt_clients WHERE attempt = 2")
    seconds = ((seen or begin) - begin) / 1e6
    return Outcome(f"heard of for {seconds:.1f} s", seconds >= 4)


def _nan_rate() -> Outcome:
    """Report a rate that is NaN, and one that is None, and then a number, through a feed."""
    program = """
        import json, sys, time
        from foreshock import AdviceFeed, Client
        client = Client(sys.argv[1], run_key="nan", spool_directory=sys.argv[2])
        client.log_scalars(1, {"reward": 1.0})
        client.flush(60)
        with AdviceFeed(client) as feed:
            for step, rate in ((1, float("nan")), (2, None), (3, 1e-6)):
                feed.acknowledge(step, rate)
            answer, end = None, time.monotonic() + 30
            while answer is None and time.monotonic() < end:
                time.sleep(0.2)
                answer = client.reader().advice(client.run_id).applied
        print(json.dumps(answer and answer.step))
    """
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as url:
        step = run_trainer(program, url, f"{folder}/spool")
    return Outcome(f"step {step} is the newest reported", step == 3)


def _reused_buffer() -> Outcome:
    """Log Arrow arrays and tables over memory that the trainer overwrites after the call, and read what arrived."""
    program = """
        import io, sys
        import numpy as np
        import pyarrow as pa
        from foreshock import Client
        client = Client(sys.argv[1], run_key="arrow", spool_directory=sys.argv[2])
        memory = np.empty(1 << 16, np.float32)
        offsets = pa.array(np.arange(0, memory.size + 1, 1024, dtype=np.int32))
        tokens = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(memory.size, np.int32)))
        for step in range(6):
            memory[:] = -0.25
            columns = {
                "prompt_token_ids": tokens, "response_token_ids": tokens,
                "rollout_log_probs": pa.ListArray.from_arrays(offsets, pa.array(memory)),
            }
            client.log_rollouts(step, columns if step % 2 else pa.table(columns))
            memory[:] = -9.0
        client.flush(120)
    """
    wrong, steps = 0, 0
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as url:
        run_trainer(program, url, f"{folder}/spool")
        with Reader(url) as reader:
            (run,) = reader.runs(key="arrow")
            for step in range(6):
                arrived = decode_rollouts(reader.export_rollouts(run.id, step)).rollout_log_probs
                assert arrived is not None
                wrong, steps = wrong + int((arrived != -0.25).sum()), steps + 1
    return Outcome(f"{wrong:,} wrong log-probs in {steps} steps", wrong == 0 and steps == 6)


def _short_rollout() -> Outcome:
    """Log 128 rollouts in each of 6 steps, one of them with a log-prob too few."""
    program = """
        import sys
        from foreshock import Client
        client = Client(sys.argv[1], run_key="short", spool_directory=sys.argv[2], heartbeat_seconds=0.5)
        for step in range(6):
            tokens = [list(range(10))] * 128
            log_probs = [[-0.5] * 10] * 100 + [[-0.5] * 9] + [[-0.5] * 10] * 27
            client.log_rollouts(step, {
                "prompt_token_ids": tokens, "response_token_ids": tokens,
                "rollout_log_probs": log_probs, "trainer_log_probs": log_probs,
            })
        client.flush(120)
        client.close()
    """
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as url:
        run_trainer(program, url, f"{folder}/spool")
        with Reader(url) as reader:
            (run,) = reader.runs(key="short")
            wait_until(lambda: bool(reader.diagnosis(run.id).missing), 20)
            arrived = [each.rollouts for each in reader.steps(run.id)]
            missing = [each.sentence for each in reader.diagnosis(run.id).missing if "did not arrive" in each.sentence]
    is_ok = arrived == [127] * 6 and missing == ["6 of the logged items and rollouts did not arrive"]
    return Outcome(f"{arrived}; {missing}", is_ok)


def _two_services() -> Outcome:
    """Log for a service that is away, then for another one, by the same user with one spool directory."""
    program = """
        import json, sys
        from foreshock import Client
        client = Client(sys.argv[1], run_key=sys.argv[2], spool_directory=sys.argv[3])
        for step in range(20):
            client.log_scalars(step, {"reward": 1.0})
        client.flush(float(sys.argv[4]))
        client.close(5)
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = folder / "first", folder / "second"
        first.mkdir()
        second.mkdir()
        port = free_port()
        run_trainer(program, f"http://127.0.0.1:{port}", "of the first", folder / "spool", "2")
        with running_service(second) as url, Reader(url) as reader:
            run_trainer(program, url, "of the second", folder / "spool", "120")
            crossed = [run.key for run in reader.runs() if run.key != "of the second"]
        with running_service(first, FORESHOCK_PORT=str(port)) as url, Reader(url) as reader:
            run_trainer(program, url, "later", folder / "spool", "120")
            arrived = sorted(run.key for run in reader.runs())
    return Outcome(f"{len(crossed)} runs crossed; the first service has {arrived}", not crossed and len(arrived) == 2)


def _many_tensors() -> Outcome:
    """Report the weights of a mixture of experts with 100,000 tensors, of which an engine holds one wrong."""
    program = """
        import sys
        from foreshock import Client
        from foreshock.notary import Piece
        client = Client(sys.argv[1], run_key="mixture", spool_directory=sys.argv[2])
        names = [f"model.layers.{each // 1000}.mlp.experts.{each % 1000}.gate_proj.weight" for each in range(100_000)]
        held = {name: [Piece("bfloat16", 10**15 + place, 768, 1024)] for place, name in enumerate(names)}
        client.log_weights(0, trainer=held, engines={"0": held})
        client.log_weights(1, trainer=held)
        client.log_weights(1, engines={"0": held | {names[7]: [Piece("bfloat16", 3, 768, 1024)]}})
        client.flush(240)
    """
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as url:
        run_trainer(program, url, f"{folder}/spool")
        with Reader(url) as reader:
            (run,) = reader.runs(key="mixture")
            judged = [(each.step, each.verdict.compared, len(each.verdict.wrong)) for each in reader.weights(run.id)]
    return Outcome(f"(step, compared, wrong): {judged}", judged == [(0, 100_000, 0), (1, 100_000, 1)])


ROWS = [
    Row(
        "full-disk-at-start",
        f"at most 4 descriptors more, no folder left, {_SERVED_ITEMS + 1} items delivered",
        lambda: _full_disk(is_served=True),
    ),
    Row(
        "full-disk-at-start-service-away",
        f"{_ITEMS:,} items: at most 4 descriptors more, no folder left, open() works",
        lambda: _full_disk(is_served=False),
    ),
    Row("exit-on-each-python", f"{_EXIT_ITEMS} items of each", _exit_on_each_python),
    Row("deadline-and-interrupt-by-https", "at most 1.2 × those by http, of 3 s", _tls),
    Row("restart-in-one-process", "the second start is heard of until its end, at least 4 s", _restart),
    Row("nan-and-none-as-rate", "the number that follows is reported", _nan_rate),
    Row("reused-arrow-memory", "0 wrong log-probs in 6 steps", _reused_buffer),
    Row("one-short-rollout-of-128", "127 in each of 6 steps, and Missing says 6", _short_rollout),
    Row("two-services-one-user", "0 runs cross, and the first service gets its own later", _two_services),
    Row("100000-tensors", "both steps judged: 100,000 compared, 0 and 1 wrong", _many_tensors),
]
