"""Kill a trainer whose client has a spool, and start it again with the same spool: every spooled item arrives once.

Items that the client holds only in memory are lost with the process, as documented. The items in its spool at the
moment of the kill are listed from outside and must be in the service at the end.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sqlalchemy import select

from benchmarks.faults.kill_points import CLIENT_POINTS, VARIABLE
from benchmarks.faults.served import Served
from benchmarks.faults.verify import Totals, check_files
from benchmarks.forking import environment
from foreshock.digests import digest_of_bytes
from foreshock_service.platform.database.tables import Attempt, Run, Scalar, Shard, Step

Mode = Literal["open", "closed", "no answers"]
_MODES: tuple[Mode, ...] = ("closed", "no answers", "open")
_STEPS = 8
_POINT_SECONDS = 2.5
_DRAIN_SECONDS = 600.0

Spooled = tuple[str, str, int]
"""(key of the attempt, kind, step)."""


class Gate:
    """A gate in front of the service: open, closed, or passing requests but no answers.

    A TCP port that forwards to another one; the mode may change at any time. End it with `close`.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = "open"
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: Mode) -> None:
        """Change the mode, also for open connections."""
        self._mode = mode
        if mode == "closed":
            for connection in list(self._connections):
                _shut(connection)

    def close(self) -> None:
        """Stop accepting connections."""
        self.set("closed")
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if self._mode == "closed":
                    connection.close()
                    continue
                with contextlib.suppress(OSError):
                    other = socket.create_connection(("127.0.0.1", self._target))
                    self._connections |= {connection, other}
                    for ends in ((connection, other, False), (other, connection, True)):
                        threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers and self._mode == "no answers":
                    break
                target.sendall(data)
        for end in (source, target):
            _shut(end)
            self._connections.discard(end)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def run_client_kills(totals: Totals, *, most: int, seed: int) -> None:
    """Kill the trainer `most` times in all; the last trainer delivers the rest."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="foreshock-faults-") as name:
        folder = Path(name)
        served = Served(folder / "service")
        served.start()
        served.wait_until("/readyz")
        gate, spool = Gate(served.port), folder / "spool"
        expected: dict[Spooled, str] = {}
        try:
            number = totals.done
            while totals.done < most:
                totals.kills[_one_launch(draw, gate, spool, number)] += 1
                found = dict(_spooled(spool))
                totals.findings.counts["spooled_at_kills"] += len(found)
                expected |= found
                number += 1
                if number % 10 == 0:
                    print(f"{time.strftime('%H:%M:%S')} client      kills {totals.done}/{most}, {len(expected)} items "
                          "were in the spool at a kill", flush=True)  # fmt: skip
            gate.set("open")
            drained_by = time.monotonic() + _DRAIN_SECONDS
            while any(spool.glob("*/*.item")) and time.monotonic() < drained_by:
                with _started_trainer(gate, spool, number, 0) as last:
                    if last.wait():
                        raise RuntimeError(f"the last trainer ended with status {last.returncode}")
            _verify(totals, served, spool, expected)
        finally:
            gate.close()
            served.kill()


def _one_launch(draw: random.Random, gate: Gate, spool: Path, number: int) -> str:
    """Start the trainer, change the gate meanwhile, and kill it; return the reason."""
    gate.set("open" if draw.random() < 0.8 else "closed")
    point = draw.choice(tuple(CLIENT_POINTS)) if draw.random() < 0.7 else None
    kill_at = "" if point is None else f"{point}:{draw.randint(1, 4)}"
    with _started_trainer(gate, spool, number, _STEPS, kill_at) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.25))
        gate.set(draw.choice(_MODES))
        reason = "random"
        if point is not None:
            try:
                trainer.wait(_POINT_SECONDS)
                reason = point
            except subprocess.TimeoutExpired:
                reason = "random, point not reached"
        else:
            time.sleep(draw.uniform(0.0, 1.0))
        trainer.kill()
    return reason


def _started_trainer(gate: Gate, spool: Path, number: int, steps: int, kill_at: str = "") -> subprocess.Popen[bytes]:
    texts = [gate.url, str(spool), *map(str, (number, number * _STEPS, steps))]
    command = [sys.executable, "-m", "benchmarks.faults.trainer", *texts]
    surroundings = environment(**{VARIABLE: kill_at})
    return subprocess.Popen(
        command, env=surroundings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _spooled(spool: Path) -> Iterator[tuple[Spooled, str]]:
    """Yield the complete entries of the spool, each with the digest of its bytes."""
    for path in spool.glob("*/*.item"):
        head, _, body = path.read_bytes().partition(b"\n")
        values = json.loads(head)
        if values["kind"] in ("rollouts", "scalars"):
            yield (values["attempt"]["key"], values["kind"], values["place"]["step"]), digest_of_bytes(body)


def _verify(totals: Totals, served: Served, spool: Path, expected: dict[Spooled, str]) -> None:
    findings = totals.findings
    left = list(spool.glob("*/*.item"))
    rejected = list(spool.glob("*.rejected"))
    if left:
        findings.problem("undelivered", f"{len(left)} items are still in the spool: {left[:3]}")
    if rejected:
        findings.problem("rejected", f"{len(rejected)}: {rejected[0].read_bytes()[:300]!r}")
    with served.database() as database:
        with database.read() as session:
            run = session.scalars(select(Run).where(Run.key == "trained")).one()
            keys = {row.attempt: row.key for row in session.scalars(select(Attempt).where(Attempt.run_id == run.id))}
            shards = session.scalars(select(Shard).where(Shard.run_id == run.id)).all()
            steps = session.scalars(select(Step).where(Step.run_id == run.id)).all()
            scalars = session.scalars(select(Scalar).where(Scalar.run_id == run.id)).all()
        stored = {(keys[row.attempt], "rollouts", row.step): row.digest for row in shards}
        reported = {(keys[row.attempt], "scalars", row.step) for row in scalars}
        for key, digest in expected.items():
            if key not in reported and stored.get(key) != digest:
                findings.problem("lost", f"spooled and not delivered: {key}")
        for step in steps:
            if (step.received_shards, step.rollouts) != (1, 8):
                findings.problem("doubled", f"step {step.step} counts {step.received_shards} shards")
        findings.counts["spooled_items"] += len(expected)
        findings.counts["acknowledged_shards"] += len(shards)
        check_files(findings, database, served.store)
    for text in findings.problems:
        print(f"  {text}", flush=True)
