"""Kill what the service needs, PostgreSQL or an S3 server, while trainers and a worker send, and start it again.

The service continues: it answers requests that it cannot store with 503, and the senders send them again. Each run is
then verified as after kills of the service; the objects of an S3 server are copied to a folder for this.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.kills import GRACE_SECONDS
from benchmarks.faults.senders import RunSender
from benchmarks.faults.served import Served
from benchmarks.faults.verify import ORPHAN_GRACE_SECONDS, Totals, check_catalogue, verify_run
from benchmarks.faults.workload import plan_run
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import open_store
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer
from tests.service.postgres import PostgresCluster

NEEDS = ("postgresql", "s3")
_LONGEST_RUNNING_SECONDS, _LONGEST_AWAY_SECONDS = 20.0, 1.0


@dataclass(frozen=True, slots=True)
class _Need:
    """A server that the service needs: the settings that name it, and functions that kill and start it."""

    kill: Callable[[], None]
    start: Callable[[], None]
    database_url: str = ""
    settings: dict[str, str] = field(default_factory=dict)


def kill_what_is_needed(name: str, totals: Totals, *, most: int, seed: int, phases: int = 5) -> None:
    """Kill PostgreSQL or the S3 server `most` times, over as many runs of `phases` phases as that takes."""
    with tempfile.TemporaryDirectory(prefix="foreshock-faults-") as place, _started(name) as need:
        folder = Path(place)
        served = Served(
            folder / "service", need.database_url,
            FORESHOCK_ORPHAN_GRACE_SECONDS=str(ORPHAN_GRACE_SECONDS),
            FORESHOCK_STEP_GRACE_SECONDS=str(GRACE_SECONDS), **need.settings,
        )  # fmt: skip
        clean = Served(folder / "clean", FORESHOCK_STEP_GRACE_SECONDS="5")
        try:
            for each in (served, clean):
                each.start()
                each.wait_until("/readyz")
            while totals.done < most:
                _one_run(name, need, totals, served, clean, most=most, seed=seed, phases=phases)
                totals.runs += 1
            check_catalogue(totals.findings, served)
        finally:
            served.kill()
            clean.kill()


def _one_run(
    name: str, need: _Need, totals: Totals, served: Served, clean: Served, *, most: int, seed: int, phases: int
) -> None:  # fmt: skip
    draw = random.Random(f"{seed}-{name}-{totals.runs}")
    plan = plan_run(seed * 100_003 + totals.runs, serial=False, phases=phases)
    sender = RunSender(served.url, plan)
    with sender.running() as thread:
        while thread.is_alive() and totals.done < most:
            sender.wait_for_answers(draw.randrange(1, 14), thread, _LONGEST_RUNNING_SECONDS)
            time.sleep(draw.uniform(0.0, 0.05))
            need.kill()
            totals.kills[f"{name} was killed"] += 1
            time.sleep(draw.uniform(0.0, _LONGEST_AWAY_SECONDS))
            need.start()
            if not served.alive:
                raise RuntimeError(f"the service ended without {name}: {served.end_of_log()}")
    verify_run(totals.findings, served, lambda: _files_of(served), sender, clean)
    print(
        f"{time.strftime('%H:%M:%S')} {name:11s} killed {totals.done:3d}/{most}, acknowledged shards "
        f"{totals.findings.counts['acknowledged_shards']:6,d}, sent again {sender.journal.failed_requests:5,d}, "
        f"problems {len(totals.findings.problems)}",
        flush=True,
    )


def _files_of(served: Served) -> Path:
    """Return a folder with the token files of the service."""
    if "FORESHOCK_STORE_ENDPOINT" not in served.settings:
        return served.store
    of_settings = {key.removeprefix("FORESHOCK_").lower(): value for key, value in served.settings.items()}
    store = open_store(Settings(**{key: of_settings[key] for key in of_settings if key.startswith("store_")}))  # type: ignore[arg-type]
    for file in store.list_files():
        path = served.folder / "copied" / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.file(file.name).read_bytes())
    return served.folder / "copied"


@contextmanager
def _started(name: str) -> Iterator[_Need]:
    """Give a PostgreSQL cluster or an S3 server."""
    # A short path, because the name of a Unix socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="fsk-", dir="/tmp"))
    if name == "postgresql":
        cluster = PostgresCluster(folder, durable=True)
        try:
            yield _Need(cluster.crash, cluster.start, cluster.new_database())
        finally:
            cluster.stop()
        return
    server = ObjectStoreServer(folder)
    settings = {
        "FORESHOCK_STORE_URL": "s3://tokens/faults",
        "FORESHOCK_STORE_ENDPOINT": server.url,
        "FORESHOCK_STORE_ACCESS_KEY_ID": ACCESS_KEY,
        "FORESHOCK_STORE_SECRET_ACCESS_KEY": SECRET_KEY,
        "FORESHOCK_STORE_TIMEOUT_SECONDS": "3",
        "FORESHOCK_STORE_TEMPORARY_FOLDER": str(folder / "temporary"),
    }
    try:
        yield _Need(server.kill, server.start, settings=settings)
    finally:
        server.kill()
